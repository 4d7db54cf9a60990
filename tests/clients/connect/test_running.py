from pathlib import Path

import pytest

from mlx_server.clients.connect.clients import CLIENTS
from mlx_server.clients.connect.running import command_of
from mlx_server.clients.connect.template import Connection
from mlx_server.clients.connect.writing import changes, write
from mlx_server.errors import SettingsError

HERE = Connection("http://127.0.0.1:8000", "none", "m", 4096)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for each in CLIENTS.values():
        (tmp_path / each.command[0]).touch(mode=0o755)
    return tmp_path


def test_a_client_that_reads_its_environment_starts_at_once() -> None:
    command, environment = command_of("claude", CLIENTS["claude"], HERE)
    assert command == ["claude"]
    assert environment["ANTHROPIC_BASE_URL"] == HERE.url


@pytest.mark.parametrize("name", CLIENTS)
def test_others_start_once_their_files_are_written(name: str) -> None:
    client = CLIENTS[name]
    if not client.starts_without_files:
        with pytest.raises(SettingsError, match="Add --write"):
            command_of(name, client, HERE)
    list(write(changes(client, HERE)))
    command, _ = command_of(name, client, HERE)
    assert command[0] == client.command[0]


def test_a_client_that_is_not_installed_is_named(home: Path) -> None:
    (home / "claude").unlink()
    with pytest.raises(SettingsError, match="install Claude Code first"):
        command_of("claude", CLIENTS["claude"], HERE)
