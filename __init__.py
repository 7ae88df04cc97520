"""teachercache: run the teacher once, stream its distributions for ever."""

__version__ = "0.1.0"
