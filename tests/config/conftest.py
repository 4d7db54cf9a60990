from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tests run in an empty folder, where the only models.yaml is their own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
