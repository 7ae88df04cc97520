"""The distillation loss: sparse teacher rows against a student, through the LM head. Derivation: README.md."""

from .loss import Tail, topk_kl
from .module import TopKKLLoss
from .rows import PAD_ID, TeacherRows
from .stats import KLStats

__all__ = ["PAD_ID", "KLStats", "Tail", "TeacherRows", "TopKKLLoss", "topk_kl"]
