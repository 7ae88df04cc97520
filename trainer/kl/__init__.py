"""The distillation loss: sparse teacher rows against a student, through the LM head. Derivation: README.md."""

from .loss import DEFAULT_CHUNK_BYTES, Tail, topk_kl
from .rows import PAD_ID, TeacherRows
from .stats import KLStats

__all__ = ["DEFAULT_CHUNK_BYTES", "PAD_ID", "KLStats", "Tail", "TeacherRows", "topk_kl"]
