"""Checkpoints of other programs, in folders made as those programs make them."""

import shutil
from pathlib import Path

import pytest

from mlx_server.sources.local import LocalModel, local_models


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def in_hub_cache(home: Path, checkpoint: Path, name: str) -> Path:
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("a" * 40)
    (repository / "blobs").mkdir(parents=True)
    shutil.copytree(checkpoint, snapshot)
    return snapshot


def found() -> dict[str, LocalModel]:
    return {model.id: model for model in local_models(upcast=False)}


def test_nothing_is_found_where_there_is_nothing(home: Path) -> None:
    assert found() == {}
    (home / "hub").write_text("no folder")
    assert found() == {}


def test_both_places_are_searched(home: Path, tiny_path: Path) -> None:
    in_hub_cache(home, tiny_path, "mlx-community/Tiny-4bit")
    studio = home / ".lmstudio/models/someone/Tiny-8bit"
    shutil.copytree(tiny_path, studio)
    models = found()
    assert sorted(models) == ["mlx-community/Tiny-4bit", "someone/Tiny-8bit"]
    assert models["mlx-community/Tiny-4bit"].source == "mlx-community/Tiny-4bit"
    assert models["someone/Tiny-8bit"].source == str(studio)
    weights = (tiny_path / "model.safetensors").stat().st_size
    assert 0 < models["someone/Tiny-8bit"].nbytes <= weights
    assert {model.family for model in models.values()} != {"-"}


def test_folders_whose_names_are_no_ids_are_left_out(home: Path, tiny_path: Path) -> None:
    for name in ("../..", "a/b/c", "evil/\x1b[31mred", "evil/${HOME}", "evil/a: b", "org/good"):
        in_hub_cache(home, tiny_path, name)
    for name in ("two words", "\x1b[31mred"):
        shutil.copytree(tiny_path, home / ".lmstudio/models/me" / name)
    assert sorted(found()) == ["me/two words", "org/good"]


def test_lm_studio_is_found_where_its_pointer_says(home: Path, tiny_path: Path) -> None:
    elsewhere = home / "disk/studio"
    shutil.copytree(tiny_path, elsewhere / "models/me/mine")
    (home / ".lmstudio-home-pointer").write_text(f"{elsewhere}\n")
    assert found()["me/mine"].source == str(elsewhere / "models/me/mine")


def test_what_cannot_be_served_says_why_and_hides_nothing_else(home: Path, tiny_path: Path) -> None:
    shutil.copytree(tiny_path, home / ".lmstudio/models/a/good")
    broken = home / ".lmstudio/models/a/broken"
    shutil.copytree(tiny_path, broken)
    (broken / "model.safetensors").write_bytes(b"no header")
    half = home / ".lmstudio/models/a/half"
    shutil.copytree(tiny_path, half)
    (half / "model.safetensors").unlink()
    (home / ".lmstudio/models/a/gguf").mkdir()
    models = found()
    assert sorted(models) == ["a/broken", "a/good", "a/half"]
    assert models["a/good"].problem == ""
    assert "is text that begins with 'no header'" in models["a/broken"].problem
    assert "lacks model*.safetensors" in models["a/half"].problem
