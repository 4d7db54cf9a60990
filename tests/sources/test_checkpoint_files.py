"""The files of a checkpoint that are missing are named."""

from pathlib import Path

import pytest

from mlx_server.errors import ModelUnusable
from mlx_server.sources.source import resolve
from tests.sources.test_source import CHECKPOINT, nothing, put

pytestmark = pytest.mark.slow


def test_missing_shards_are_named(tmp_path: Path) -> None:
    shard = "model-0000{}-of-00003.safetensors"
    folder = put(tmp_path / "mine", [*CHECKPOINT[:2], shard.format(1), shard.format(3)])
    with pytest.raises(ModelUnusable, match=f"lacks {shard.format(2)}[.]"):
        resolve(str(folder), nothing)
    (folder / shard.format(2)).touch()
    assert resolve(str(folder), nothing) == folder


def test_a_link_to_nowhere_is_missing(tmp_path: Path) -> None:
    folder = put(tmp_path / "mine", CHECKPOINT[:2])
    (folder / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelUnusable, match=r"model\*.safetensors"):
        resolve(str(folder), nothing)
