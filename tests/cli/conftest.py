import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, with no settings around it."""
    for name in [name for name in os.environ if name.startswith("MLX_SERVER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLX_SERVER_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def studio(tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """LM Studio's folder, with two models."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    folder = tmp_path / ".lmstudio/models/org"
    for name in ("one", "two"):
        shutil.copytree(tiny_path, folder / name)
    return folder
