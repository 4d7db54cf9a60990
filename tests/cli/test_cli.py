"""All commands: their help, their exit codes, and how they tell of mistakes."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mlx_server.cli import app
from mlx_server.families.table import markdown
from tests.cli.running import run

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize("command", [[], ["serve"], ["chat"], ["doctor"]])
def test_help_teaches_by_example(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    examples = [line for line in result.output.splitlines() if line.startswith("  mlx-server ")]
    assert result.exit_code == 0
    assert 2 <= len(examples) <= 4
    assert "\b" not in result.output


@pytest.mark.slow
def test_families_are_shown_without_a_server() -> None:
    shown = run("models", "--families", "--markdown")
    assert (shown.stdout, shown.returncode) == (markdown(), 0)
    assert "[TOOL_CALLS]…" in run("models", "--families").stdout


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from mlx_server.cli import app;"
        "assert CliRunner().invoke(app, ['serve', '--help']).exit_code == 0;"
        "print({'fastapi', 'httpx', 'mlx', 'yaml'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout == "set()\n"


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        ("ModelUnusable('It is damaged. Fetch it again.')", 1, "It is damaged. Fetch it again.\n"),
        ("SettingsError('bad')", 2, "bad\n"),
        ("SettingsError('\\x1b[31mhttp://me:pw@host')", 2, "[31mhttp://host\n"),
        ("BrokenPipeError(32, 'Broken pipe')", 1, ""),
        (
            "PermissionError(13, 'Permission denied', 'f')",
            1,
            "'f' can't be read or written: Permission denied. Check the path, its permissions and "
            "the free space on its disk.\n",
        ),
        ("KeyboardInterrupt", 130, ""),
    ],
)
def test_exit_codes(error: str, code: int, stderr: str) -> None:
    program = (
        "import sys; from mlx_server.errors import *; from mlx_server import cli\n"
        f"@cli.app.command()\ndef boom() -> None: raise {error}\n"
        "sys.argv[1:] = ['boom']; cli.main()"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (out.returncode, out.stderr.strip(), out.stdout) == (code, stderr.strip(), "")
