"""scripts/test: a test that ends its process, or hangs, is named, and the others still run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_parts.__main__ import SPREAD

pytestmark = pytest.mark.soak

SCRIPTS = Path(__file__).parents[1] / "scripts"
FILES, CASES = "abcd", range(4)
LIMIT = """
faulthandler_timeout = 2
faulthandler_exit_on_timeout = true
"""
TESTS = """
import os, time
import pytest

@pytest.mark.parametrize("n", range(4))
def test_it(n):
    if f"{__name__[-1]}{n}" in os.environ["FATAL"]:
        ENDS
"""


def run(folder: Path, fatal: str, ends: str) -> tuple[str, str]:
    """Output, and what is on standard error."""
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = -p no:cacheprovider\n{LIMIT}")
    for name in FILES:
        (folder / f"test_{name}.py").write_text(TESTS.replace("ENDS", ends))
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own |= {"PYTHONPATH": str(SCRIPTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "FATAL": fatal}
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-n", "2", *SPREAD]
    done = subprocess.run(
        command, cwd=folder, env=own, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stdout
    assert "units waiting" not in done.stdout + done.stderr, "xdist's own log is for --debug"
    return done.stdout, done.stderr


@pytest.mark.parametrize("fatal", ["a0", "b3", "d0", "d3"])
def test_the_others_run_after_a_process_was_lost(tmp_path: Path, fatal: str) -> None:
    output, _ = run(tmp_path, fatal, "os._exit(9)")
    name = f"test_{fatal[0]}.py::test_it[{fatal[1]}]"
    assert f"crashed while running '{name}'" in output
    assert f"1 failed, {len(FILES) * len(CASES) - 1} passed" in output


def test_a_test_that_hangs_is_ended_and_says_where(tmp_path: Path) -> None:
    output, errors = run(tmp_path, "b1", "time.sleep(3600)")
    assert "crashed while running 'test_b.py::test_it[1]'" in output
    assert f"1 failed, {len(FILES) * len(CASES) - 1} passed" in output
    assert 'test_b.py", line 8 in test_it' in errors


def test_many_processes_may_be_lost(tmp_path: Path) -> None:
    """Also before the process that replaces one has collected its tests."""
    output, _ = run(tmp_path, "a0 b0 c0 d0", "os._exit(9)")
    assert f"4 failed, {len(FILES) * len(CASES) - 4} passed" in output
