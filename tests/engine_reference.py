"""What rows must be, written as plainly as possible in float64, one position at a time; and tiny teachers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers

from teachercache.format_spec import PAD_ID, Rows

Float64 = npt.NDArray[np.float64]


@dataclass
class PlainRow:
    """One position: ids and logprobs of the support, and the tail."""

    ids: list[int]
    logprobs: Float64
    log_tail_mass: float
    logsumexp: float
    entropy: float
    tail: Float64
    draws: list[int]


def plain_row(logits: npt.ArrayLike, k: int, tail_samples: int, u: float, min_prob: float = 0.0) -> PlainRow:
    """Return the row of one position by the definitions."""
    z = np.asarray(logits, dtype=np.float64)
    order = np.lexsort((np.arange(len(z)), -z))
    p = np.exp(z - z.max())
    p /= p.sum()
    ids = [int(v) for v in order[:k] if z[v] > -np.inf and (v == order[0] or p[v] >= min_prob)]
    lse = logsumexp(z)
    off = z.copy()
    off[ids] = -np.inf
    log_p = z - lse
    finite = z > -np.inf
    entropy = -float(np.sum(np.exp(log_p[finite]) * log_p[finite]))
    if not (off > -np.inf).any():
        return PlainRow(ids, log_p[ids], -np.inf, lse, entropy, np.zeros_like(z), [PAD_ID] * tail_samples)
    weights = np.exp(off - off.max())
    sums = np.cumsum(weights)
    draws = [int(np.argmax(sums > (u + j) / tail_samples * sums[-1])) for j in range(tail_samples)]
    return PlainRow(ids, log_p[ids], logsumexp(off) - lse, lse, entropy, weights / sums[-1], draws)


def logsumexp(z: Float64) -> float:
    """Return the log of the sum of exp(z)."""
    return float(z.max() + np.log(np.sum(np.exp(z - z.max()))))


def assert_rows_match(
    rows: Rows, logits_PV: torch.Tensor, uniforms_P: Float64, atol: float = 1e-4, min_prob: float = 0.0
) -> None:
    """Check every column against the definitions.

    Ids may differ where logits are within `atol`, and one draw in ten, since logits carry noise from their batch.
    """
    same_draws: list[bool] = []
    for i, logits in enumerate(logits_PV.double().numpy()):
        row = plain_row(logits, rows.k, rows.tail_samples, float(uniforms_P[i]), min_prob)
        count = len(row.ids)
        ids = rows.token_ids_PK[i]
        assert (ids[count:] == PAD_ID).all()
        assert len(set(ids[:count].tolist())) == count
        assert (ids[:count] != PAD_ID).all()
        np.testing.assert_allclose(logits[ids[:count]], logits[row.ids], atol=atol, rtol=0)
        np.testing.assert_allclose(rows.logprobs_PK[i, :count], row.logprobs, atol=atol, rtol=0)
        assert (rows.logprobs_PK[i, count:] == -np.inf).all()
        for column, expected in (
            (rows.log_tail_mass_P, row.log_tail_mass),
            (rows.logsumexp_P, row.logsumexp),
            (rows.entropy_P, row.entropy),
        ):
            assert column is not None
            np.testing.assert_allclose(column[i], expected, atol=atol, rtol=1e-6)
        if rows.tail_token_ids_PN is not None:
            draws = rows.tail_token_ids_PN[i].tolist()
            assert draws == sorted(draws)
            assert not set(draws) & set(ids.tolist()) or draws[0] == PAD_ID
            same_draws += [draw == plain for draw, plain in zip(draws, row.draws, strict=True)]
    if same_draws:
        assert np.mean(same_draws) >= 0.9


def gap_near(share: float, logits_PV: torch.Tensor) -> float:
    """Return a threshold near `share` that no probability comes close to, so that rounding decides nothing."""
    p = np.sort(logits_PV.double().softmax(1).numpy().ravel())
    candidates = share * np.linspace(0.9, 1.1, 501)
    places = np.searchsorted(p, candidates)
    below, above = p[np.maximum(places - 1, 0)], p[np.minimum(places, len(p) - 1)]
    return float(candidates[np.argmax(np.minimum(abs(candidates - below), abs(candidates - above)) / candidates)])


def chi_square(counts: Float64, expected: Float64) -> tuple[float, float]:
    """Return the statistic and the value that 1 in 100,000 fair samples exceeds; bins below 5 are pooled."""
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    # Wilson and Hilferty: the cube root is almost normal, and 4.27 deviations are exceeded by 1e-5
    limit = degrees * (1 - 2 / (9 * degrees) + 4.27 * np.sqrt(2 / (9 * degrees))) ** 3
    return float(np.sum((observed - wanted) ** 2 / wanted)), float(limit)


def save_tiny(kind: str, folder: Path) -> Path:
    """Save a small random causal model whose distributions are far from uniform, and return its folder."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 48, "max_position_embeddings": 64, "vocab_size": 211}
    configs = {
        "llama": lambda: transformers.LlamaConfig(**sizes, initializer_range=0.4),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.4
        ),
        "softcapped": lambda: transformers.Gemma2Config(
            **sizes, head_dim=8, initializer_range=0.4, final_logit_softcapping=5.0
        ),
        "scaled": lambda: transformers.GraniteConfig(**sizes, initializer_range=0.4, logits_scaling=0.5),
    }
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(configs[kind]())
    model.save_pretrained(folder)
    return folder
