"""Checkpoints that many tests share, made once. MLX is imported only where a test needs it."""

from pathlib import Path
from typing import Any

import pytest

from mlx_server.pool.sources import resolve


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights; see tests/tiny.py."""
    from tests.tiny import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_model(tiny_path: Path) -> Any:
    """Its network, as the engine loads it."""
    from mlx_server.engine import weights

    loading = weights.load(tiny_path)
    while True:
        try:
            next(loading)
        except StopIteration as end:
            return end.value


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model, which is real; fetched once per machine."""
    return resolve("demo:smollm2", lambda what, done, total: None)
