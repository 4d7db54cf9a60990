"""`mlx-server connect`: what is shown, written and started. No server is asked."""

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mlx_server.cli import app
from mlx_server.clients.connect import listing, markdown
from mlx_server.errors import SettingsError

GIVEN = ("--model", "my-model", "--context-length", "4321", "--url", "http://127.0.0.1:9")
CODEX = ".codex/mlx-server.config.toml"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MLX_SERVER_API_KEYS", raising=False)
    for name in ("claude", "codex"):
        (tmp_path / name).touch(mode=0o755)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, str]]]:
    """The programs that have taken the place of the command."""
    started: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *given: started.append(given))
    return started


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["connect", *arguments])


def test_without_a_client_all_are_listed() -> None:
    assert run().output == listing()
    assert run("--markdown").output == markdown()


def test_an_unknown_client_is_told_the_nearest_ones() -> None:
    error = run("cldue", *GIVEN).exception
    assert isinstance(error, SettingsError)
    assert "no client 'cldue'" in error.message
    assert "claude" in error.message
    assert "`mlx-server connect`" in error.message


def test_lines_are_written_and_each_file_is_named(home: Path, started: Any) -> None:
    written = run("codex", *GIVEN, "--write")
    assert written.exit_code == 0
    assert CODEX in written.output
    assert "codex --profile mlx-server" in written.output
    for given in ("my-model", "4321", "http://127.0.0.1:9/v1"):
        assert given in (home / CODEX).read_text()
    assert started == []
    assert "export COPILOT_MODEL=my-model\n" in run("copilot-cli", *GIVEN, "--write").output


def test_a_client_is_started_with_its_variables_added_to_ours(
    monkeypatch: pytest.MonkeyPatch, started: Any
) -> None:
    monkeypatch.setenv("OURS", "kept")
    monkeypatch.setenv("ANTHROPIC_MODEL", "another")
    run("claude", *GIVEN, "--api-key", "secret", "--run")
    [(program, command, environment)] = started
    assert (program, command) == ("claude", ["claude"])
    expected = {
        "OURS": "kept",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
        "ANTHROPIC_AUTH_TOKEN": "secret",
        "ANTHROPIC_MODEL": "my-model",
    }
    assert environment.items() >= expected.items()


def test_a_client_that_needs_files_starts_after_they_are_written(started: Any) -> None:
    error = run("codex", *GIVEN, "--run").exception
    assert isinstance(error, SettingsError)
    assert "Add --write" in error.message
    assert started == []
    assert run("codex", *GIVEN, "--write", "--run").exit_code == 0
    assert [program for program, *_ in started] == ["codex"]
