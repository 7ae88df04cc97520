"""Peak memory of the loss and its gradients on one batch of the cache, each way in a process of its own.

Run as `python -m teachercache.demo.peak INPUTS fused|dense`: prints the megabytes that the loss and its gradients took
on top of its inputs, as the growth of the process's maximum resident size.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

SEQUENCES = 4


def save_inputs(student_folder: Path, cache: Path, target: Path) -> None:
    """Write hidden states, head and rows of one batch, so that the measured process never holds the student."""
    import torch

    from ..client import stream_topk
    from ..trainer.batch import to_tensors
    from ..trainer.student import Student

    with stream_topk(str(cache), batch_size=SEQUENCES) as stream:
        tensors = to_tensors(next(iter(stream)), "cpu")
    student = Student.load(str(student_folder), device="cpu")
    with torch.no_grad():
        hidden_RH = student.hidden_BTH(tensors.input_ids_BT)[:, :-1][tensors.counted_BP].clone()
    rows = {name: getattr(tensors.rows, name) for name in tensors.rows.__dataclass_fields__}
    torch.save({"hidden": hidden_RH, "weight": student.head_VH.detach().clone(), "rows": rows}, target)


def measure(inputs: Path, way: str) -> float:
    """Return the peak of `way` in MB."""
    command = [sys.executable, "-m", "teachercache.demo.peak", str(inputs), way]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def dense_loss(hidden_RH: Any, weight_VH: Any, rows: Any) -> Any:
    """The `sampled` objective (or `bucket` where rows have no draws) as one would write it without chunks."""
    import torch

    logq_RV = (hidden_RH @ weight_VH.t()).log_softmax(-1)
    kept_RK = rows.token_ids_PK >= 0
    p_RK = rows.logprobs_PK.exp()
    loss = -(p_RK * logq_RV.gather(1, rows.token_ids_PK.clamp_min(0)))[kept_RK].sum()
    if rows.tail_token_ids_PN is None:
        tail_RV = logq_RV.scatter(1, rows.token_ids_PK.clamp_min(0), -torch.inf)
        return (loss - (rows.log_tail_mass_P.exp() * tail_RV.logsumexp(-1)).sum()) / len(hidden_RH)
    drawn_RN = logq_RV.gather(1, rows.tail_token_ids_PN.clamp_min(0))
    return (loss - (rows.log_tail_mass_P.exp() * drawn_RN.mean(1)).sum()) / len(hidden_RH)


def main(inputs: str, way: str) -> None:
    """Print the peak of one way."""
    import torch

    from ..trainer.kl import TeacherRows, topk_kl

    saved = torch.load(inputs, weights_only=True)
    rows = TeacherRows(**saved["rows"])
    loss_of = dense_loss if way == "dense" else topk_kl
    # a small vocabulary first, so that what libraries take once is not counted
    few = TeacherRows(torch.tensor([[0]]), torch.tensor([[-0.1]]), torch.tensor([-2.35]))
    loss_of(torch.ones(1, 4).requires_grad_(), torch.ones(9, 4).requires_grad_(), few).backward()
    hidden_RH, weight_VH = saved["hidden"].requires_grad_(), saved["weight"].requires_grad_()
    baseline = _peak_mb()
    loss_of(hidden_RH, weight_VH, rows).backward()
    print(round(_peak_mb() - baseline, 1))


def _peak_mb() -> float:
    """Return the largest resident size that this process had, in MB."""
    status = Path("/proc/self/status")
    if status.exists():
        # Linux hands ru_maxrss on from parent to child; this one begins anew
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return float(line.split()[1]) * 1024 / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e6 / 1024)


if __name__ == "__main__":
    main(*sys.argv[1:])
