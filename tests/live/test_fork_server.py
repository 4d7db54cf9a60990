import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_server import __version__
from tests.live.fork_server import PRELOADED, ForkedProcess, can_fork, fork

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="servers are forked on Linux only")


def forked(folder: Path, *arguments: str) -> tuple[ForkedProcess, Path]:
    file = folder / "stderr"
    with file.open("wb") as stderr:
        return fork(arguments, os.environ, folder, stderr.fileno()), file


def test_it_runs_a_command_as_an_interpreter_of_its_own_does(tmp_path: Path) -> None:
    process, _ = forked(tmp_path, "--version")
    with process.stdout as stdout:
        assert stdout.read() == f"mlx-server {__version__}\n"
    assert process.wait(20) == process.poll() == 0


def test_it_ends_with_the_same_code_and_messages(tmp_path: Path) -> None:
    process, stderr = forked(tmp_path, "serve", "--config", "nowhere.yaml")
    with process.stdout as stdout:
        assert stdout.read() == ""
    assert process.wait(20) == 2
    command = [sys.executable, "-m", "mlx_server", "serve", "--config", "nowhere.yaml"]
    started = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert stderr.read_text("utf-8") == started.stderr
    assert "nowhere.yaml" in started.stderr


def test_a_signal_is_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("models: {}")
    process, _ = forked(tmp_path, "serve", "--port", "0")
    with process.stdout as stdout:
        assert stdout.readline().startswith("Listening")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0)
        process.kill()
        assert process.wait(20) == -signal.SIGKILL
    process.kill()  # that has ended


def test_what_imports_read_needs_a_new_interpreter() -> None:
    assert can_fork(sys.executable, {**os.environ, "MLX_SERVER_DATA": "elsewhere"})
    assert not can_fork(sys.executable, {**os.environ, "PYTHONPATH": "elsewhere"})
    assert not can_fork(sys.executable, {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:1"})
    assert not can_fork("limited", os.environ)


IMPORTS = f"""
import importlib, os
from tests.live.fork_server import read_by_imports
before = read_by_imports(os.environ)
for name in {(*PRELOADED, "mlx_lm")}:
    importlib.import_module(name)
assert read_by_imports(os.environ) == before
"""


def test_imports_change_nothing_that_imports_read() -> None:
    """Otherwise whether a test's server is forked would depend on the tests before it."""
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, cwd=Path(__file__).parents[2])
