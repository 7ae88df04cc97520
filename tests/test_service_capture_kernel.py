"""The capture kernels give what plain torch gives; in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_reference import plain_row
from torch import Tensor

from teachercache.format_spec import PAD_ID, Rows
from teachercache.service.engines import capture as capture_module
from teachercache.service.engines.capture import capture

triton = pytest.importorskip("triton")

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.usefixtures("one_thread")]


def by_kernel(logits_PV: Tensor, **how: Any) -> Rows:
    """Rows by the kernels."""
    from teachercache.service.engines.capture_kernel import columns_of

    return columns_of(logits_PV, **({"min_prob": 0.0} | how)).to_rows()


def by_torch(logits_PV: Tensor, **how: Any) -> Rows:
    """Rows by the plain path, on the CPU."""
    return capture(logits_PV.cpu(), **how)


def normal(positions: int, vocab: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Logits that spread like a model's."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(positions, vocab, generator=generator) * 3).to(dtype).to(device)


def uniforms(positions: int) -> Any:
    """The same numbers each time."""
    return np.random.default_rng(1).random(positions)


def assert_same(found: Rows, expected: Rows) -> None:
    """Ids alike, draws too; numbers to float32's last digits."""
    np.testing.assert_array_equal(found.token_ids_PK, expected.token_ids_PK)
    for name in ("logprobs_PK", "log_tail_mass_P", "logsumexp_P", "entropy_P"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=2e-6, atol=2e-6, err_msg=name)
    if expected.tail_token_ids_PN is not None:
        assert found.tail_token_ids_PN is not None
        assert (found.tail_token_ids_PN == expected.tail_token_ids_PN).mean() >= 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("vocab", "k"), [(1, 1), (5, 5), (128, 16), (129, 16), (300, 299), (1000, 1), (1000, 40), (4099, 100)]
)
def test_rows_are_those_of_plain_torch(device: str, vocab: int, k: int, dtype: torch.dtype) -> None:
    logits_PV = normal(6, vocab, device, dtype)
    for tail_samples, min_prob in ((0, 0.0), (1, 0.0), (16, 0.0), (16, 0.03)):
        how = {"k": k, "tail_samples": tail_samples, "uniforms_P": uniforms(6), "min_prob": min_prob}
        assert_same(by_kernel(logits_PV, **how), by_torch(logits_PV, **how))


def test_ties_go_to_the_lowest_ids(device: str) -> None:
    """Values of few digits: the k-th is shared by many ids, in more blocks than are read again."""
    generator = torch.Generator().manual_seed(3)
    logits_PV = torch.randint(0, 3, (20, 3000), generator=generator).float().to(device)
    logits_PV[0] = 1.0
    how = {"k": 16, "tail_samples": 8, "uniforms_P": uniforms(20)}
    found = by_kernel(logits_PV, **how)
    assert_same(found, by_torch(logits_PV, **how))
    assert found.token_ids_PK[0].tolist() == list(range(16))
    assert not (found.tail_token_ids_PN[:, :, None] == found.token_ids_PK[:, None, :]).any()


def test_what_is_no_distribution_is_absent(device: str) -> None:
    logits_PV = normal(6, 700, device)
    logits_PV[0, 300] = torch.nan
    logits_PV[1, 699] = torch.inf
    logits_PV[2] = -torch.inf
    logits_PV[3, 5:] = -torch.inf
    logits_PV[4, :] = torch.nan
    how = {"k": 8, "tail_samples": 4, "uniforms_P": uniforms(6)}
    found = by_kernel(logits_PV, **how)
    assert_same(found, by_torch(logits_PV, **how))
    assert found.absent_P.tolist() == [True, True, True, False, True, False]
    assert (found.token_ids_PK[3] == PAD_ID).sum() == 3 and (found.tail_token_ids_PN[3] == PAD_ID).all()


def test_a_thin_tail_keeps_its_digits(device: str) -> None:
    """A tail of 1e-12 of the whole: 1 less the head is 0 in float32, and without a digit in float64."""
    logits_PV = normal(8, 2000, device)
    logits_PV[:, 77] += 45.0
    how = {"k": 1, "tail_samples": 16, "uniforms_P": uniforms(8)}
    found = by_kernel(logits_PV, **how)
    for row, logits_V in enumerate(logits_PV.cpu().numpy()):
        plain = plain_row(logits_V, 1, 16, how["uniforms_P"][row])
        assert abs(found.log_tail_mass_P[row] - plain.log_tail_mass) < 1e-5
        assert np.mean(found.tail_token_ids_PN[row] == plain.draws) >= 0.9


def test_columns_beyond_the_vocabulary_and_rows_that_are_apart(device: str) -> None:
    """As vLLM gives them: a view of wider rows."""
    wide_PV = normal(5, 640, device)
    wide_PV[:, 500:] = 90.0
    how = {"k": 16, "tail_samples": 8, "uniforms_P": uniforms(5)}
    assert_same(by_kernel(wide_PV[:, :500], **how), by_torch(wide_PV[:, :500].contiguous(), **how))
    assert_same(by_kernel(wide_PV.t()[:500].t(), **how), by_torch(wide_PV[:, :500].contiguous(), **how))


def test_no_positions(device: str) -> None:
    found = by_kernel(normal(0, 300, device), k=4, tail_samples=2, uniforms_P=uniforms(0))
    assert found.token_ids_PK.shape == (0, 4) and found.tail_token_ids_PN.shape == (0, 2)


def test_large_vocabularies(device: str) -> None:
    """On a GPU at a real size, where draws are compared with float64's."""
    vocab, positions = (151_936, 64) if device == "cuda" else (5_000, 3)
    for dtype in (torch.float32, torch.bfloat16):
        logits_PV = normal(positions, vocab, device, dtype)
        for k, tail_samples in ((16, 16), (100, 0)):
            how = {"k": k, "tail_samples": tail_samples, "uniforms_P": uniforms(positions)}
            assert_same(by_kernel(logits_PV, **how), by_torch(logits_PV, **how))


def test_a_gpu_takes_the_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    from teachercache.service.engines import capture_kernel

    monkeypatch.setattr(capture_kernel, "columns_of", lambda *args, **how: taken.append(how["k"]))
    logits_PV = normal(2, 2000, device)
    for k in (capture_module.MAX_KERNEL_K, capture_module.MAX_KERNEL_K + 1):
        capture_module.capture_columns(logits_PV, k=k, tail_samples=0, uniforms_P=uniforms(2))
    assert taken == ([capture_module.MAX_KERNEL_K] if device == "cuda" else [])
