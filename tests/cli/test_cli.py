"""All commands: their help, their exit codes, and how they tell of mistakes."""

import io
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from mlx_server import __version__
from mlx_server.cli import app, root
from mlx_server.cli.terminal import printable
from mlx_server.config.models_yaml import check_file, load_settings
from mlx_server.families.table import markdown
from tests.live.fork_server import ran
from tests.tables import cases

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.slow
def test_families_are_shown_without_a_server() -> None:
    shown = ran("models", "--families", "--markdown")
    assert (shown.stdout, shown.returncode) == (markdown(), 0)
    assert "[TOOL_CALLS]…" in ran("models", "--families").stdout


def test_help_and_a_wrong_command_load_nothing_heavy() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from mlx_server.cli import app;"
        "assert CliRunner().invoke(app, ['serve', '--help']).exit_code == 0;"
        "assert \"Did you mean 'chat'\" in CliRunner().invoke(app, ['chta']).output;"
        "print({'fastapi', 'httpx', 'mlx', 'yaml'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (out.stdout, out.stderr) == ("set()\n", "")


@pytest.mark.slow
def test_no_command_needs_an_optional_package() -> None:
    program = (
        "import sys; from importlib import import_module\n"
        "from mlx_server.cli.root import COMMANDS\n"
        "sys.modules.update(dict.fromkeys(('openai', 'langchain_core', 'ibm_watsonx_ai')))\n"
        "for name in COMMANDS: import_module(f'mlx_server.cli.{name}')"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stderr == ""


ENDS = [
    ("ModelUnusable('It is damaged. Fetch it again.')", 1, "It is damaged. Fetch it again."),
    ("SettingsError('bad')", 2, "bad"),
    ("SettingsError('\\x1b[31mhttp://me:pw@host')", 2, "[31mhttp://host"),
    ("BrokenPipeError(32, 'Broken pipe')", 1, ""),
    (
        "PermissionError(13, 'Permission denied', 'f')",
        1,
        "'f' can't be read or written: Permission denied. Check the path, its permissions and "
        "the free space on its disk.",
    ),
    ("KeyboardInterrupt", 130, ""),
]
RAISING = """
import os, sys
from mlx_server.cli.root import COMMANDS
from mlx_server.errors import *
from mlx_server import cli

COMMANDS["boom"] = "it is known, so that no others are looked at, which would take a second"
for error in sys.argv[1:]:
    if not os.fork():
        @cli.app.command()
        def boom() -> None: raise eval(error)
        sys.argv[1:] = ["boom"]
        cli.main()
    code = os.waitstatus_to_exitcode(os.wait()[1])
    print(f"exit code {code}", file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_exit_codes() -> None:
    errors = [error for error, _, _ in ENDS]
    command = [sys.executable, "-c", RAISING, *errors]
    out = subprocess.run(command, capture_output=True, text=True)
    said = [f"{stderr}\nexit code {code}".strip() for _, code, stderr in ENDS]
    assert (out.stderr.strip(), out.stdout) == ("\n".join(said), "")


def test_ctrl_c_while_modules_are_imported_shows_nothing(folder: Path) -> None:
    (folder / "typer.py").write_text("raise KeyboardInterrupt\n")  # in place of the real one
    program = "import sys; sys.path.insert(0, sys.argv[1]); import mlx_server.cli"
    command = [sys.executable, "-c", program, str(folder)]
    out = subprocess.run(command, capture_output=True, text=True)
    assert (out.returncode, out.stdout, out.stderr) == (-signal.SIGINT, "", "")


def shown(text: str) -> str:
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="truecolor").print(printable(text))
    return out.getvalue().removesuffix("\n")


@cases
def test_text_is_shown_as_it_is(text: str) -> None:
    assert shown(text) == text


@cases
def test_control_characters_become_spaces(text: str, expected: str) -> None:
    assert printable(text).plain == expected
    assert "\x1b" not in shown(text)


@pytest.mark.usefixtures("studio")
def test_a_first_file_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "models.yaml"
    done = CliRunner().invoke(app, ["init"])
    assert done.exit_code == 0, done.output
    assert check_file(file) == []
    assert list(load_settings(file).models) == ["smollm2-135m", "recorded", "org/one", "org/two"]
    file.write_text("models: {}\n", "utf-8")
    again = CliRunner().invoke(app, ["init"])
    assert again.exit_code == 1
    assert "models.yaml is there already" in str(again.exception)
    assert file.read_text("utf-8") == "models: {}\n"


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
