"""An engine with a tiny model, and what it answers."""

from pathlib import Path

import pytest

from mlx_server.worker.engine import Engine
from tests.worker.batch_runs import ids
from tests.worker.engine_runs import ask, load, run, tokens_of


@pytest.fixture
def engine(tiny_path: Path) -> Engine:
    engine = Engine(concurrency=4)
    load(engine, tiny_path)
    return engine


@pytest.fixture
def answer(tiny_path: Path) -> list[int]:
    """To `ask` as it stands, from an engine that did nothing else."""
    engine = Engine()
    load(engine, tiny_path)
    return ids(tokens_of(0, run(engine, ask(0))))
