"""What large requests leave behind is given back to the system."""

import ctypes
import os
import subprocess
import sys

import pytest

from mlx_server.system.process import MAPPED_BYTES, return_large_blocks

PROGRAM = f"""
from mlx_server.system.process import return_large_blocks

return_large_blocks()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

for size in range(2, 31):  # each one that is freed raises the threshold for those after it
    block = bytearray(size * {MAPPED_BYTES})
    del block
before = resident()
small, large = [], []
for _ in range(16):
    large.append(bytearray(b"x" * (2 * {MAPPED_BYTES})))
    small.append(bytearray(b"x" * (100 << 10)))  # it stays, and lies above the large one
del large
print((resident() - before) // {MAPPED_BYTES})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other allocators have no such option")
def test_large_blocks_are_returned_as_soon_as_they_are_freed() -> None:
    """Of 32 MiB; by default glibc would keep them between the small ones."""
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, env=own)
    assert int(run.stdout) <= 4


@pytest.mark.parametrize("error", [OSError("no library"), AttributeError("no mallopt")])
def test_where_there_is_no_such_option_nothing_happens(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: object) -> None:
        raise error

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    return_large_blocks()


def test_other_systems_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", None)
    return_large_blocks()
