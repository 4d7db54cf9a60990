"""The server of a test run ends with its standard input, at whatever point of its start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_server.testing import KEY_VARIABLE
from tests.live.ranks import free_ports
from tests.live.server import STOP_SECONDS

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "mlx_server.replay_server"]


def test_an_input_that_has_ended_before_it_started_ends_it(tmp_path: Path) -> None:
    run = subprocess.run(
        [*COMMAND, str(free_ports(1))],
        input=b"",
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, KEY_VARIABLE: "secret"},
        timeout=STOP_SECONDS,
    )
    assert b"Traceback" not in run.stderr
    assert b"secret" not in run.stdout + run.stderr
