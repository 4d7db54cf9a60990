"""Models of which only their files' sizes matter."""

from pathlib import Path

import pytest

from mlx_server.engine import supervisor
from mlx_server.pool import prepare as preparing
from mlx_server.pool.prepare import ModelSpec
from tests.families import byte_level, write_checkpoint
from tests.pool.machine import WEIGHTS


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are not measured, and a lost engine is replaced at once."""
    monkeypatch.setattr(
        preparing, "weights_bytes", lambda path, upcast: 500 if path.name == "huge" else WEIGHTS
    )
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("m", "huge"):
        path = write_checkpoint(
            root / name, byte_level(), config={"model_type": "gpt2", "max_position_embeddings": 100}
        )
        (path / "model.safetensors").touch()
    return root


@pytest.fixture
def a(folder: Path, sizes: None) -> ModelSpec:
    return ModelSpec("a", str(folder / "m"), aliases=("gpt-4", "default"))


@pytest.fixture
def b(folder: Path, sizes: None) -> ModelSpec:
    return ModelSpec("b", str(folder / "m"))


@pytest.fixture
def huge(folder: Path, sizes: None) -> ModelSpec:
    return ModelSpec("huge", str(folder / "huge"))
