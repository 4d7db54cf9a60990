"""`mlx-server cache`: what it shows, and what it removes."""

import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mlx_server.cli import app
from mlx_server.prompt_files import PromptFile, PromptFolder, encoded, group_of
from mlx_server.system.files import create_locked


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLX_SERVER_CONFIG", raising=False)
    monkeypatch.setenv("MLX_SERVER_DATA", str(tmp_path / "data"))
    return tmp_path / "data" / "prompts"


def fill(path: Path, *models: str) -> PromptFolder:
    folder = PromptFolder(path, 1 << 30)
    folder.open()
    for model in models:
        for number in range(3):
            file = PromptFile(group_of(model), group_of(str(number)), 4)
            ids = np.arange(4, dtype=np.uint32)
            folder.write(file, encoded(file, ids, model, {}))
    return folder


def shown(*flags: str, code: int = 0) -> list[str]:
    result = CliRunner().invoke(app, ["cache", *flags])
    assert result.exit_code == code, result.output
    return list(result.output.splitlines())


def test_what_is_there_is_counted_by_model_while_a_server_uses_it(folder: Path) -> None:
    fill(folder, "first", "second")
    (folder / PromptFile(group_of("odd"), group_of("odd"), 4).name).write_text("[bold]")
    lines = shown()
    assert lines[2].endswith("kB by all servers, at most 64.0 GB a day")
    assert [line.split(", last")[0] for line in sorted(lines[3:])] == [
        "first: 3 files, 12.3 kB",
        "second: 3 files, 12.3 kB",
        "unknown: 1 files, 4.1 kB",
    ]


def test_it_is_cleared(folder: Path) -> None:
    fill(folder, "first", "second")
    (folder / "notes").write_text("mine")
    draft = folder / f"{PromptFile(group_of('first'), group_of('9'), 4).name}.draft"
    descriptor = create_locked(draft)
    assert "removed        3 files" in shown("--clear", "--model", "first")
    assert draft.exists(), "a server is writing it"
    os.close(descriptor)
    assert "removed        0 files" in shown("--clear", "--model", "first")
    assert "removed        3 files" in shown("--clear")
    assert {entry.name for entry in folder.iterdir()} == {"lock", "notes", "written"}


def test_a_server_that_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("server: {prompt_cache: {disk: 0}}\n")
    assert "not kept on disk" in shown()[0]


def test_what_is_left_of_an_earlier_setting_is_shown_and_removed(
    folder: Path, tmp_path: Path
) -> None:
    fill(folder, "first")
    (tmp_path / "models.yaml").write_text("server: {prompt_cache: {disk: 0}}\n")
    lines = shown()
    assert "not kept on disk" in lines[0]
    assert lines[1:3] == [str(folder), "size           12.3 kB, at most 0 bytes"]
    assert lines[4].startswith("first: 3 files")
    assert "removed        3 files" in shown("--clear")
    assert {entry.name for entry in folder.iterdir()} == {"lock", "written"}


def test_a_model_is_not_cleared_by_mistake() -> None:
    shown("--model", "first", code=2)
