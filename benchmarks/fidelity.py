"""Is a student of a cache as good as one of the live teacher?

Same text, order, start and steps; what differs is the target. A student of every other layer of the small real teacher
(of two, on a CPU) learns from labels alone (`ce`), from the live teacher's distribution (`live`), and from caches:
written as shards, read back, and trained on with `topk_kl`. Held-out text tells KL(teacher || student) over the whole
vocabulary, perplexity, calibration (ECE, 15 bins, percent) and agreement of the first choice. `gap_closed` is
(ce - x) / (ce - live) of the held-out KL. A `seed` is an order of the text and a seed of the tail samples' draws;
differences to `live` are paired by it. Runs are kept in `--state` as they are done, so a call that `--seconds` ends is
gone on with by the next one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _fidelity_data import Cached, Ids, Kind, sequences_of, teacher_rows
from _results import RESULTS, arguments, finish, hardware
from torch import Tensor

from teachercache.demo.model import ensure_model
from teachercache.trainer import Student
from teachercache.trainer.kl import topk_kl

DEFAULT = "sampled 16+16"
# two-sided 95 percent of Student's t, by degrees of freedom
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
CACHES: dict[str, tuple[Kind, dict[str, Any]]] = {
    DEFAULT: (Kind(16, 16), {"tail": "sampled"}),
    "truncated 100": (Kind(100, 0), {"tail": "truncated"}),
    "bucket 100": (Kind(100, 0), {"tail": "bucket"}),
    "sampled 24+8": (Kind(24, 8), {"tail": "sampled"}),
    "sampled 32+16": (Kind(32, 16), {"tail": "sampled"}),
    "sampled 32+32": (Kind(32, 32), {"tail": "sampled"}),
    "sampled 1+25": (Kind(1, 25), {"tail": "sampled"}),
    "renorm 100": (Kind(100, 0), {"tail": "renorm"}),
    "to_label 100": (Kind(100, 0), {"tail": "to_label"}),
    "bucket 100 + 0.3 ce": (Kind(100, 0), {"tail": "bucket", "ce_weight": 0.3}),
    **{f"bucket {k}": (Kind(k, 0), {"tail": "bucket"}) for k in (8, 16, 32)},
    **{f"truncated {k}": (Kind(k, 0), {"tail": "truncated"}) for k in (8, 16, 32)},
    **{f"{DEFAULT} {profile}": (Kind(16, 16, profile), {"tail": "sampled"}) for profile in ("fp16", "m5")},
    **{f"bucket 100 {profile}": (Kind(100, 0, profile), {"tail": "bucket"}) for profile in ("fp16", "m5")},
}
CORE = ("ce", "live", DEFAULT, "truncated 100", "bucket 100")
# over the same stored draws again and again
FOUR_EPOCHS = ("ce", "live", DEFAULT, "sampled 32+32", "truncated 100", "bucket 100")


class Bench:
    """The teacher, the text, the caches made of it, and the students' start."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.path = ensure_model()
        self.train: Ids = sequences_of(self.path, args.steps * args.batch, args.length, held_out=False)
        self.heldout: Ids = sequences_of(self.path, args.heldout, args.length, held_out=True)
        self._live: Any = None
        self._caches: dict[tuple[int, Kind], Cached] = {}

    @property
    def live(self) -> Any:
        """The teacher itself."""
        if self._live is None:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(self.path, dtype=self.dtype)
            self._live = model.to(self.device).eval().requires_grad_(False)
        return self._live

    def make_caches(self, seed: int, kinds: list[Kind]) -> None:
        """Have the teacher score the text once for all caches of a seed."""
        kinds = [kind for kind in dict.fromkeys(kinds) if (seed, kind) not in self._caches]
        if not kinds:
            return
        begin = time.perf_counter()
        rows = teacher_rows(self.path, self.train, kinds, seed)
        for kind in kinds:
            vocab_size = self.live.config.vocab_size
            self._caches[seed, kind] = Cached(self.train, rows[kind], kind, vocab_size, self.device)
        say(f"{len(kinds)} caches of {self.train.size:,} tokens in {time.perf_counter() - begin:.0f} s")

    def drop_caches(self, seed: int) -> None:
        """Forget what was made for a seed."""
        self._caches = {key: cache for key, cache in self._caches.items() if key[0] != seed}

    def student(self) -> Student:
        """The start of every run."""
        layers = self.live.config.num_hidden_layers
        keep = list(range(0, layers, 2)) if self.device == "cuda" else [0, layers - 1]
        return Student.load(str(self.path), device=self.device, keep_layers=keep)

    def teacher_logits(self, ids_BT: Tensor) -> Tensor:
        """The live teacher's logits [P, V] in float32."""
        with torch.no_grad():
            logits: Tensor = self.live(ids_BT).logits[:, :-1]
        return logits.flatten(0, 1).float()

    def run(self, name: str, seed: int, epochs: int) -> dict[str, Any]:
        """Train one student and return how good it is."""
        args = self.args
        torch.manual_seed(seed)
        student = self.student()
        optimizer = torch.optim.AdamW(student.model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.0)
        loss_of = self._loss(name, seed)
        # one epoch is the whole text; four are four passes over a quarter of it
        own = len(self.train) // epochs
        random = np.random.default_rng(seed)
        order = np.concatenate([random.permutation(own) for _ in range(epochs)])
        student.model.train()
        begin = time.perf_counter()
        for step in range(args.steps):
            rate = (
                args.lr * min(1.0, (step + 1) / (0.05 * args.steps)) * 0.5 * (1 + math.cos(math.pi * step / args.steps))
            )
            optimizer.param_groups[0]["lr"] = rate
            chosen = order[step * args.batch : (step + 1) * args.batch]
            ids_BT = torch.from_numpy(self.train[chosen].astype(np.int64)).to(self.device)
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                hidden_BTH = student.hidden_BTH(ids_BT)
            loss = loss_of(student, hidden_BTH[:, :-1].flatten(0, 1), ids_BT, chosen)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - begin
        kind = CACHES[name][0] if name in CACHES else None
        size = None if kind is None else self._caches[seed, kind].bytes_per_token
        return {"name": name, "seed": seed, "epochs": epochs, "train_s": seconds, "bytes_per_token": size} | self.score(
            student
        )

    def _loss(self, name: str, seed: int) -> Callable[[Student, Tensor, Tensor, Any], Tensor]:
        """The loss of a run, from hidden states [P, H]."""

        def labels(ids_BT: Tensor) -> Tensor:
            return ids_BT[:, 1:].flatten()

        def ce(student: Student, hidden_PH: Tensor, ids_BT: Tensor, chosen: Any) -> Tensor:
            return topk_kl(hidden_PH, student.head_VH, None, labels=labels(ids_BT), ce_weight=1.0)

        def live(student: Student, hidden_PH: Tensor, ids_BT: Tensor, chosen: Any) -> Tensor:
            # the same products as in ours, and the whole distribution
            head_VH = student.head_VH.to(hidden_PH.dtype)
            student_PV = (hidden_PH @ head_VH.T).float().log_softmax(-1)
            teacher_PV = self.teacher_logits(ids_BT).log_softmax(-1)
            return (teacher_PV.exp() * (teacher_PV - student_PV)).sum(-1).mean()

        if name in ("ce", "live"):
            return {"ce": ce, "live": live}[name]
        kind, options = CACHES[name]
        cache = self._caches[seed, kind]

        def cached(student: Student, hidden_PH: Tensor, ids_BT: Tensor, chosen: Any) -> Tensor:
            return topk_kl(hidden_PH, student.head_VH, cache.batch(chosen), labels=labels(ids_BT), **options)

        return cached

    @torch.no_grad()
    def score(self, student: Student) -> dict[str, float]:
        """Held-out KL in nats, perplexity, ECE in percent and agreement of the first choice."""
        student.model.eval()
        kl = nll = agree = 0.0
        confidence, right = [], []
        for begin in range(0, len(self.heldout), 8):
            ids_BT = torch.from_numpy(self.heldout[begin : begin + 8].astype(np.int64)).to(self.device)
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                hidden_PH = student.hidden_BTH(ids_BT)[:, :-1].flatten(0, 1)
            head_VH = student.head_VH.to(hidden_PH.dtype)
            student_PV = (hidden_PH @ head_VH.T).float().log_softmax(-1)
            teacher_PV = self.teacher_logits(ids_BT).log_softmax(-1)
            labels_P = ids_BT[:, 1:].flatten()
            kl += float((teacher_PV.exp() * (teacher_PV - student_PV)).sum(dtype=torch.float64))
            nll -= float(student_PV.gather(1, labels_P[:, None]).sum(dtype=torch.float64))
            best = student_PV.max(1)
            agree += float((best.indices == teacher_PV.argmax(1)).sum())
            confidence.append(best.values.exp().cpu())
            right.append((best.indices == labels_P).float().cpu())
        count = self.heldout.shape[0] * (self.heldout.shape[1] - 1)
        return {
            "kl": kl / count,
            "perplexity": math.exp(nll / count),
            "ece": 100 * calibration_error(torch.cat(confidence), torch.cat(right)),
            "top1": agree / count,
        }


def calibration_error(confidence_P: Tensor, right_P: Tensor, bins: int = 15) -> float:
    """Expected calibration error of the first choice, with bins of equal width."""
    error = 0.0
    for number in range(bins):
        inside = (confidence_P > number / bins) & (confidence_P <= (number + 1) / bins)
        if inside.any():
            error += float(inside.float().mean() * (confidence_P[inside].mean() - right_P[inside].mean()).abs())
    return error


def plan(args: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """Yield (name, seed, epochs) of every run, what matters most first."""
    for seed in range(args.seeds):
        yield from ((name, seed, 1) for name in CORE)
    for seed in range(min(args.seeds, args.seeds_epochs)):
        yield from ((name, seed, 4) for name in FOUR_EPOCHS)
    for seed in range(min(args.seeds, args.seeds_others)):
        yield from ((name, seed, 1) for name in CACHES if name not in CORE)


def table(runs: list[dict[str, Any]], epochs: int) -> list[dict[str, Any]]:
    """One line for each target: means over seeds, spread, and the paired difference to the live teacher."""
    of: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        if run["epochs"] == epochs:
            of.setdefault(run["name"], {})[run["seed"]] = run
    if "ce" not in of or "live" not in of:
        return []
    lines = []
    for name, by_seed in of.items():
        shared = sorted(set(by_seed) & set(of["ce"]) & set(of["live"]))
        if not shared:
            continue
        values = {key: [by_seed[s][key] for s in shared] for key in ("kl", "perplexity", "ece", "top1")}
        differences = [by_seed[s]["kl"] - of["live"][s]["kl"] for s in shared]
        gaps = [(of["ce"][s]["kl"] - by_seed[s]["kl"]) / (of["ce"][s]["kl"] - of["live"][s]["kl"]) for s in shared]
        interval = None
        if len(shared) > 1:
            half = T95[len(shared) - 1] * statistics.stdev(differences) / math.sqrt(len(shared))
            interval = [statistics.mean(differences) - half, statistics.mean(differences) + half]
        lines.append(
            {
                "name": name,
                "seeds": len(shared),
                "bytes_per_token": next(iter(by_seed.values()))["bytes_per_token"],
                **{key: statistics.mean(found) for key, found in values.items()},
                "kl_spread": statistics.stdev(values["kl"]) if len(shared) > 1 else None,
                "gap_closed": statistics.mean(gaps),
                "difference_to_live": statistics.mean(differences),
                "difference_95": interval,
            }
        )
    return lines


def figures_of(state: dict[str, Any]) -> dict[str, Any]:
    """The tables, and what is asked of them at the top."""
    once, four = table(state["runs"], 1), table(state["runs"], 4)
    found: dict[str, Any] = {"settings": state["settings"]}
    for suffix, lines in (("", once), ("_four_epochs", four)):
        by_name = {line["name"]: line for line in lines}
        for key, name in (("default", DEFAULT), ("truncated_k100", "truncated 100"), ("bucket_k100", "bucket 100")):
            if name in by_name:
                found[f"gap_closed_{key}{suffix}"] = by_name[name]["gap_closed"]
                found[f"bytes_per_token_{key}"] = by_name[name]["bytes_per_token"]
        if DEFAULT in by_name:
            found[f"difference_95_default{suffix}"] = by_name[DEFAULT]["difference_95"]
    return {**found, "one_epoch": once, "four_epochs": four, "runs": state["runs"]}


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Share of the gap closed against bytes per token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [line for line in lines if line["bytes_per_token"]]
    if not shown:
        return
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.axhline(100, color="0.6", linestyle="--", label="live teacher")
    for line in shown:
        kind = line["name"].split()[0]
        colour = {"sampled": "C0", "bucket": "C2", "truncated": "C3"}.get(kind, "0.4")
        axes.scatter(line["bytes_per_token"], 100 * line["gap_closed"], color=colour, zorder=3)
        axes.annotate(line["name"], (line["bytes_per_token"], 100 * line["gap_closed"]), fontsize=8, xytext=(4, 3),
                      textcoords="offset points")  # fmt: skip
    axes.set(xlabel="bytes per token", ylabel="share of the gap from labels to the live teacher closed, %")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Do the runs that are not done yet, while there is time."""
    begin = time.perf_counter()
    settings = {name: getattr(args, name) for name in ("steps", "batch", "length", "heldout", "lr")}
    state = {"settings": settings, "runs": []}
    if args.state and args.state.exists():
        state = json.loads(args.state.read_text())
        if state["settings"] != settings:
            raise SystemExit(f"{args.state} holds runs of other settings: {state['settings']}")
    known = {(run["name"], run["seed"], run["epochs"]) for run in state["runs"]}
    bench = Bench(args)
    left = [run for run in plan(args) if run not in known]
    longest = 0.0
    for number, (name, seed, epochs) in enumerate(left):
        if time.perf_counter() - begin + longest > args.seconds:
            say(f"{len(left) - number} runs are left for the next call")
            break
        started = time.perf_counter()
        bench.make_caches(
            seed, [CACHES[other][0] for other, own, _ in left[number:] if other in CACHES and own == seed]
        )
        run = bench.run(name, seed, epochs)
        state["runs"].append(run)
        longest = max(longest, time.perf_counter() - started)
        if args.state:
            args.state.write_text(json.dumps(state))
        say(f"{name}, seed {seed}, {epochs} epochs: KL {run['kl']:.4f}, {run['train_s']:.0f} s")
        if all(own != seed for _, own, _ in left[number + 1 :]):
            bench.drop_caches(seed)
    figures = figures_of(state)
    if args.save:
        plot(figures["one_epoch"], RESULTS / f"fidelity.{hardware()}.png")
    return figures


def say(text: str) -> None:
    """Print progress beside the result."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    on_gpu = torch.cuda.is_available()
    parser = arguments("Students of caches against students of the live teacher; see the module.")
    parser.add_argument("--steps", type=int, default=200 if on_gpu else 24)
    parser.add_argument("--batch", type=int, default=32 if on_gpu else 4, help="sequences of a step")
    parser.add_argument("--length", type=int, default=512 if on_gpu else 128, help="tokens of a sequence")
    parser.add_argument("--heldout", type=int, default=256 if on_gpu else 24, help="sequences held out")
    parser.add_argument("--lr", type=float, default=4e-4 if on_gpu else 8e-4)
    parser.add_argument("--seeds", type=int, default=5 if on_gpu else 2)
    parser.add_argument("--seeds-epochs", type=int, default=3 if on_gpu else 1)
    parser.add_argument("--seeds-others", type=int, default=2 if on_gpu else 1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run that would end later")
    parser.add_argument("--state", type=Path, help="keep runs here, and go on with those that are there")
    args = parser.parse_args()
    finish("fidelity", measure(args), ["torch", "transformers", "numpy"], args)
