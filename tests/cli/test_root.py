"""The app of all commands: its help, its version, mistakes on the command line and crashes."""

import sys
from typing import NoReturn

import pytest
from typer.testing import CliRunner, Result

from mlx_server import __version__
from mlx_server.cli import app, root

NAME = "mlx-server"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, prog_name=NAME)


@pytest.mark.parametrize("name", root.COMMANDS)
def test_the_list_of_commands_has_the_first_line_of_their_help(name: str) -> None:
    help = run(name, "--help").output.partition("\n\n")[2]
    assert " ".join(help.split()).startswith(root.COMMANDS[name])
    assert root.COMMANDS[name][:40] in run("--help").output


def test_no_line_of_any_help_is_wider_than_a_terminal_or_cut() -> None:
    groups: list[list[str]] = [[]]
    for words in groups:  # grows by the commands of each group
        lines = run(*words, "--help").output.splitlines()
        assert [line for line in lines if len(line) > 80] == []
        assert [line for line in lines if line.startswith("  ") and line.endswith("...")] == []
        listed = lines[lines.index("Commands:") + 1 :] if "Commands:" in lines else []
        groups += [[*words, line.split()[0]] for line in listed if line[2:3].strip()]
    assert ["service", "install"] in groups


def test_without_a_command_the_help_is_shown() -> None:
    assert run().output == run("--help").output
    for example in ("serve ", "chat ", "connect codex --write --run ", "doctor "):
        assert f"\n  {NAME} {example}" in run().output


def test_the_version_is_shown_before_anything_else_is_read() -> None:
    for arguments in (["--version"], ["--version", "no-command"]):
        shown = run(*arguments)
        assert (shown.output, shown.exit_code) == (f"{NAME} {__version__}\n", 0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["srve"], "'srve'"),
        (["serve", "--prot", "1"], "--prot"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(arguments: list[str], named: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert named in result.output


def test_a_crash_shows_no_local_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(app, "registered_commands", [])

    @app.command()
    def boom() -> NoReturn:
        key = "hunter" + "2"
        raise ZeroDivisionError(len(key))

    with pytest.raises(ZeroDivisionError) as raised:
        app(["boom"])
    sys.excepthook(raised.type, raised.value, raised.tb)
    shown = capsys.readouterr().err
    assert "ZeroDivisionError" in shown
    assert "hunter2" not in shown
