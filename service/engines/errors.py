"""Errors of the teacher engines, beside `UnsupportedTeacher` and `MissingExtra` of the service.

ServiceError
├── EngineError                  the engine did not do what it must
│   ├── UnknownEngine            no engine has this name
│   ├── EngineDied               its processes ended or hang: loaded again, it may go on
│   └── InvalidSetting           a dtype, device, k or count that the engine cannot run with
└── SequenceError
    ├── UnscorableSequence       token ids that the teacher cannot be asked about
    └── UntokenizableExample     text or messages that its tokenizer cannot turn into a sequence
"""

from __future__ import annotations

from ...format_spec import Code
from ..errors import SequenceError, ServiceError


class EngineError(ServiceError):
    """The engine did not do what it must."""


class UnknownEngine(EngineError):
    """No engine has this name."""

    code = Code.INVALID_CONFIG


class EngineDied(EngineError):
    """The engine's processes ended, or do nothing any more; another may be loaded."""


class InvalidSetting(EngineError):
    """A setting is not one that the engine can run with."""

    code = Code.INVALID_CONFIG


class UnscorableSequence(SequenceError):
    """Sequence number `index` of those given cannot be scored by this teacher."""

    def __init__(self, message: str, code: Code, index: int) -> None:
        super().__init__(message, code)
        self.index = index


class UntokenizableExample(SequenceError):
    """The teacher's tokenizer or chat template cannot turn the example into a sequence."""
