"""An engine with a tiny model, and what it answers."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from mlx_server.worker.engine import Engine
from tests.worker.batch_runs import ids
from tests.worker.engine_runs import ask, load, run, tokens_of
from tests.worker.kinds import KINDS, ONE_OF_EACH


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a kind, which is saved when it is first asked for."""
    folder = tmp_path_factory.mktemp("kinds")
    return cache(lambda name: KINDS[name].save(folder / name))


@pytest.fixture(scope="module", params=ONE_OF_EACH)
def path(request: pytest.FixtureRequest, made: Callable[[str], Path]) -> Path:
    return made(request.param)


@pytest.fixture(scope="session")
def llama(made: Callable[[str], Path]) -> Path:
    return made("llama")


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
