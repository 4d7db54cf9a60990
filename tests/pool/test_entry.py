"""What the pool records of one model."""

from pathlib import Path

import pytest

from mlx_server.pool import models as entries
from mlx_server.pool.models import PoolEntry
from mlx_server.pool.prepare import Capabilities, ModelSpec, capabilities_on_disk
from tests.families import byte_level, write_checkpoint


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[ModelSpec]:
    """The models whose files were read."""
    read: list[ModelSpec] = []

    def look(spec: ModelSpec) -> Capabilities | None:
        read.append(spec)
        return capabilities_on_disk(spec)

    monkeypatch.setattr(entries, "capabilities_on_disk", look)
    return read


def checkpoint(folder: Path) -> Path:
    made = write_checkpoint(folder, byte_level(), config={"model_type": "llama"})
    (made / "model.safetensors").write_bytes(bytes(8))
    return made


def architecture(entry: PoolEntry) -> str | None:
    return entry.capabilities.architecture if entry.capabilities else None


def test_files_of_no_use_are_read_again_once_they_have_changed(
    tmp_path: Path, reads: list[ModelSpec]
) -> None:
    folder = checkpoint(tmp_path / "m")
    (folder / "config.json").write_text("{")
    entry = PoolEntry(ModelSpec("m", str(folder)))
    for _ in range(3):
        entry.look_for_capabilities()
    assert len(reads) == 1
    assert architecture(entry) is None
    (folder / "config.json").write_text('{"model_type": "llama"}')
    entry.look_for_capabilities()
    assert architecture(entry) == "llama"


def test_files_that_are_not_there_are_looked_for_each_time(
    tmp_path: Path, reads: list[ModelSpec]
) -> None:
    entry = PoolEntry(ModelSpec("m", str(tmp_path / "m")))
    entry.look_for_capabilities()
    assert architecture(entry) is None
    checkpoint(tmp_path / "m")
    entry.look_for_capabilities()
    assert architecture(entry) == "llama"


@pytest.mark.parametrize("source", ["replay:/none.yaml", "none/none", "\0"])
def test_other_sources_are_no_error(source: str, reads: list[ModelSpec]) -> None:
    entry = PoolEntry(ModelSpec("m", source))
    for _ in range(2):
        entry.look_for_capabilities()
    assert entry.capabilities is None
    assert len(reads) == 2
