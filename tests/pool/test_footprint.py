"""The memory of a process, and of one that has ended."""

import os
import subprocess
import sys

import psutil

from mlx_server.pool.footprint import footprint


def test_it_grows_with_what_a_process_holds() -> None:
    before = footprint(os.getpid())
    assert before > 1_000_000
    held = bytearray(os.urandom(32_000_000))
    assert footprint(os.getpid()) - before > len(held) / 2


def test_a_process_that_has_ended_takes_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not psutil.pid_exists(ended.pid)
    assert footprint(ended.pid) == 0
