"""`mlx-server store` and `mlx-server cache`: what they show, and what they remove."""

import asyncio
import os
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mlx_server.cli import app
from mlx_server.config.models_yaml import load_settings
from mlx_server.prompt_files import PromptFile, PromptFolder, encoded, group_of
from mlx_server.store import ItemRecord, Record, Store
from mlx_server.system.files import create_locked

DAY = 86400.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLX_SERVER_CONFIG", raising=False)
    monkeypatch.setenv("MLX_SERVER_DATA", str(tmp_path / "data"))
    return tmp_path


def fill() -> None:
    async def write() -> None:
        store = await Store.open(load_settings(None).store.path)
        for id, age in [("resp_old", 40), ("resp_new", 0)]:
            made = time.time() - age * DAY
            output = [ItemRecord(f"msg_{id}", b"{}")]
            response = Record("response", id, made, b"{}", "completed", output=output)
            await store.add(response, "")
        await store.add(Record("conversation", "conv_1", time.time(), b"{}"), "")
        await store.close()

    asyncio.run(write())


def shown(*flags: str, code: int = 0) -> dict[str, str]:
    """By the first word of each line."""
    result = CliRunner().invoke(app, ["store", *flags])
    assert result.exit_code == code, result.output
    pairs = (line.partition(" ") for line in result.output.splitlines())
    return {name: rest.strip() for name, _, rest in pairs}


def test_nothing_is_there_yet_and_nothing_is_made(folder: Path) -> None:
    found = shown()
    assert found[f"{folder / 'data' / 'responses.sqlite3'}:"] == "nothing is stored yet"
    assert not (folder / "data").exists()


def test_what_is_there_is_counted(folder: Path) -> None:
    fill()
    found = shown()
    assert str(folder / "data" / "responses.sqlite3") in found
    assert found["responses"].startswith("2, from ")
    assert (found["conversations"], found["items"]) == ("1", "2")
    assert found["kept"] == "for 30 days, at most 10000 of each"


def test_pruning(folder: Path) -> None:
    fill()
    found = shown("--prune")
    assert found["pruned"] == "1"
    assert found["responses"].startswith("1, of ")
    (folder / "models.yaml").write_text("store: {days: 90}\n")
    found = shown("--prune")
    assert (found["pruned"], found["kept"]) == ("0", "for 90 days, at most 10000 of each")


def test_it_works_beside_a_server(folder: Path) -> None:
    async def beside() -> None:
        store = await Store.open(load_settings(None).store.path)
        try:
            assert (await asyncio.to_thread(shown, "--prune"))["pruned"] == "0"
        finally:
            await store.close()

    asyncio.run(beside())


# The cache of prompts


def fill_prompts(path: Path, *models: str) -> PromptFolder:
    folder = PromptFolder(path, 1 << 30)
    folder.open()
    for model in models:
        for number in range(3):
            file = PromptFile(group_of(model), group_of(str(number)), 4)
            ids = np.arange(4, dtype=np.uint32)
            folder.write(file, encoded(file, ids, model, {}))
    return folder


def cache_shown(*flags: str, code: int = 0) -> list[str]:
    result = CliRunner().invoke(app, ["cache", *flags])
    assert result.exit_code == code, result.output
    return list(result.output.splitlines())


@pytest.fixture
def prompts(folder: Path) -> Path:
    return folder / "data" / "prompts"


def test_what_is_there_is_counted_by_model_while_a_server_uses_it(prompts: Path) -> None:
    fill_prompts(prompts, "first", "second")
    (prompts / PromptFile(group_of("odd"), group_of("odd"), 4).name).write_text("[bold]")
    lines = cache_shown()
    assert lines[2].endswith("kB by all servers, at most 64.0 GB a day")
    assert [line.split(", last")[0] for line in sorted(lines[3:])] == [
        "first: 3 files, 12.3 kB",
        "second: 3 files, 12.3 kB",
        "unknown: 1 files, 4.1 kB",
    ]


def test_it_is_cleared(prompts: Path) -> None:
    fill_prompts(prompts, "first", "second")
    (prompts / "notes").write_text("mine")
    draft = prompts / f"{PromptFile(group_of('first'), group_of('9'), 4).name}.draft"
    descriptor = create_locked(draft)
    assert "removed        3 files" in cache_shown("--clear", "--model", "first")
    assert draft.exists(), "a server is writing it"
    os.close(descriptor)
    assert "removed        0 files" in cache_shown("--clear", "--model", "first")
    assert "removed        3 files" in cache_shown("--clear")
    assert {entry.name for entry in prompts.iterdir()} == {"lock", "notes", "written"}


def test_what_is_left_of_an_earlier_setting_is_shown_and_removed(
    prompts: Path, folder: Path
) -> None:
    fill_prompts(prompts, "first")
    (folder / "models.yaml").write_text("server: {prompt_cache: {disk: 0}}\n")
    lines = cache_shown()
    assert "not kept on disk" in lines[0]
    assert lines[1:3] == [str(prompts), "size           12.3 kB, at most 0 bytes"]
    assert lines[4].startswith("first: 3 files")
    assert "removed        3 files" in cache_shown("--clear")
    assert {entry.name for entry in prompts.iterdir()} == {"lock", "written"}


def test_a_model_is_not_cleared_by_mistake() -> None:
    cache_shown("--model", "first", code=2)
