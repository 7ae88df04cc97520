"""Fixtures that several test files share."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rank_processes import Ranks

try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    # Without a GPU kernels run in Triton's interpreter, if that is chosen before anything imports triton.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the chaos goes on."""
    parser.addoption("--kills", type=int, default=3, help="kills of test_service_chaos.py (%(default)s)")


@pytest.fixture(scope="session")
def teacher_dir() -> Path:
    """The real small teacher, made once in the user's cache."""
    from teachercache.demo.model import ensure_model

    return ensure_model()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes that share a process group; to start them takes seconds, a call milliseconds."""
    from rank_processes import Ranks

    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tensors of a few kilobytes: on a busy machine, threads that wait for one another cost a hundredfold."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that nobody wrote to reads as NaN."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
