"""The server of a test run starts, says why it can't, and ends with the run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mlx_server.testing import ServerGone, TestRunServer
from tests.live.server import assert_gone

pytestmark = pytest.mark.slow


def test_the_server_ends_with_a_test_run_that_is_killed(tmp_path: Path) -> None:
    code = "\n".join(
        [
            "import sys, pathlib",
            "from mlx_server.testing import TestRunServer",
            "print(TestRunServer(pathlib.Path(sys.argv[1])).pid, flush=True)",
            "sys.stdin.read()",
        ]
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        server = psutil.Process(int(run.stdout.readline()))
        family = [server, *server.children(recursive=True)]
        os.kill(run.pid, signal.SIGKILL)
    assert_gone(family)


def test_modules_are_compiled_once_even_where_nothing_may_be_written_next_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("MLX_SERVER_CACHE", str(tmp_path / "cache"))
    server = TestRunServer(tmp_path)
    try:
        server.begin_test()
        compiled = {path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")}
    finally:
        server.stop()
    assert {"app", "loaded_models"} <= compiled, "the server's modules and the engine's"


def test_a_server_that_can_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "uvicorn.py").write_text("raise RuntimeError('of the environment')")
    with pytest.raises(ServerGone, match=r"did not start(?s:.)*of the environment"):
        TestRunServer(tmp_path).begin_test()
