"""Engines whose prompts outlive them on a disk, for one test."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_server.worker.prefill import disk_tier
from tests.worker.kinds import KINDS
from tests.worker.prefill.disk_runs import ON_DISK, Process, Start


@pytest.fixture(scope="module", params=ON_DISK, ids=lambda kind: kind.name)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(request.param.save(tmp_path_factory.mktemp("disk") / request.param.name))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[0].save(tmp_path_factory.mktemp("disk") / "llama")


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
