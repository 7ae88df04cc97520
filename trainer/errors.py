"""Errors of the trainer.

TeachercacheError
└── TrainerError
    ├── InvalidConfig        a setting that cannot work
    ├── UnsupportedStudent   a model whose loss would not be what we compute
    ├── TokenizerMismatch    the cache speaks of other tokens than the student
    ├── NothingToTrainOn     no row of the cache counts
    ├── CheckpointError      a checkpoint that cannot be continued from
    └── Diverged             the loss is no longer a number
"""

from __future__ import annotations

from ..format_spec import Code, TeachercacheError


class TrainerError(TeachercacheError):
    """Base of all errors that the trainer raises on purpose."""


class InvalidConfig(TrainerError):
    """A setting is out of range or contradicts another."""

    code = Code.INVALID_CONFIG


class UnsupportedStudent(TrainerError):
    """The student cannot be loaded, or its logits are not hidden states times head."""

    code = Code.UNSUPPORTED_STUDENT


class TokenizerMismatch(TrainerError):
    """The cache was made with another tokenizer than the student has."""

    code = Code.TOKENIZER_MISMATCH


class NothingToTrainOn(TrainerError):
    """Every row of the cache is masked or absent."""

    code = Code.INVALID_DATASET


class CheckpointError(TrainerError):
    """A checkpoint belongs to another run than the one asked for."""

    code = Code.INVALID_CONFIG


class Diverged(TrainerError):
    """The loss or its gradient is no longer finite."""

    code = Code.JOB_FAILED
