"""The memory of a process, and of one that has ended."""

import subprocess
import sys

import psutil

from mlx_server.pool.memory import footprint

HOLDER = """
import os, sys
print("started", flush=True)
sys.stdin.readline()
held = os.urandom(32_000_000)
print(len(held), flush=True)
sys.stdin.read()
"""


def test_it_grows_with_what_a_process_holds() -> None:
    """In a process of its own: one that has freed memory before allocates that first."""
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        assert holder.stdout.readline() == "started\n"
        before = footprint(holder.pid)
        assert before > 1_000_000
        holder.stdin.write("\n")
        held = int(holder.stdout.readline())
        assert footprint(holder.pid) - before > held / 2


def test_a_process_that_has_ended_takes_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not psutil.pid_exists(ended.pid)
    assert footprint(ended.pid) == 0
