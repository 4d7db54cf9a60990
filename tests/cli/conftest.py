import os
from pathlib import Path

import pytest

from tests.cli.running import ROOT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, with no settings around it."""
    for name in [name for name in os.environ if name.startswith("MLX_SERVER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLX_SERVER_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path
