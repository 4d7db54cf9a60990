"""Engines whose prompts outlive them on a disk, for one test."""

from collections.abc import Iterator
from typing import Any

import pytest

from mlx_server.worker.prefill import disk_tier
from tests.worker.prefill.disk_runs import Process, Start


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[Process] = []

    def begin(*arguments: Any, **named: Any) -> Process:
        processes.append(Process(*arguments, **named))
        return processes[-1]

    yield begin
    for process in processes:
        process.stop()


@pytest.fixture(scope="module")
def _at_once() -> Iterator[None]:
    """Prompts are written as soon as no row runs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk_tier, "IDLE_SECONDS", 0.0)
        yield
