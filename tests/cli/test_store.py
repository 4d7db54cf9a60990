"""`mlx-server store`: what it shows, and what it removes."""

import asyncio
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlx_server.cli import app
from mlx_server.config.models_yaml import load_settings
from mlx_server.store import ItemRecord, Record, Store

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
