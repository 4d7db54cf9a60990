"""scripts/test: what fails is run once more, and a test that ends its process is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_parts.__main__ import RUN_AGAIN, SCRIPTS, SPREAD

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from pathlib import Path
from test_parts.__main__ import Run, run_all
sys.exit(run_all(Run(Path("cache"), sys.argv[1:], takes_slow=True), lambda: None))
"""
INI = """
[pytest]
addopts = -q -p xdist.plugin
markers =
    alone: after the others
faulthandler_timeout = 3
faulthandler_exit_on_timeout = true
"""
TESTS = """
import os, time
from pathlib import Path
import pytest

def fails(name, times=1):
    with Path("ran").open("a") as ran:
        ran.write(f"{name} ")
    assert Path("ran").read_text().split().count(name) > times

@pytest.fixture
def late():
    yield
    fails("late")
"""


def run(folder: Path, tests: str, *command: str) -> tuple[int, list[str]]:
    (folder / "pytest.ini").write_text(INI)
    (folder / "test_it.py").write_text(TESTS + tests)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the other plugins take seconds to import
    own["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), own.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, *(command or ("-c", PROGRAM))],
        cwd=folder,
        env=own,
        text=True,
        timeout=120,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return process.returncode, process.stdout.splitlines()


def test_what_passes_the_second_time_is_flaky_and_the_run_passes(tmp_path: Path) -> None:
    tests = """
@pytest.mark.alone
def test_alone(): fails("alone")
def test_good(): fails("good", 0)
def test_torn_down(late): pass
@pytest.mark.parametrize("text", ["a b", "é::["])
def test_once(text): fails(ascii(text).replace(" ", ""))
"""
    code, lines = run(tmp_path, tests)
    assert code == 0, lines
    assert {line.partition("::")[2] for line in lines if line.startswith("flaky: ")} == {
        "test_alone",
        "test_torn_down",
        "test_once[a b]",
        "test_once[\\xe9::[]",
    }
    ran = (tmp_path / "ran").read_text().split()
    assert ran.count("good") == 1
    assert ran.index("alone") == 4, "after the others"


def test_what_fails_twice_has_failed(tmp_path: Path) -> None:
    tests = 'def test_bad(): fails("bad", 2)\ndef test_once(): fails("once")\n'
    code, lines = run(tmp_path, tests)
    assert code == 1
    assert lines[-2:] == ["FAILED test_it.py::test_bad", "flaky: test_it.py::test_once"]


def test_much_that_fails_is_not_run_again(tmp_path: Path) -> None:
    range_of_many = f"range({RUN_AGAIN + 1})"
    tests = f"""
@pytest.mark.parametrize("n", {range_of_many})
def test_bad(n): fails("bad", 999)
"""
    code, _ = run(tmp_path, tests)
    assert code == 1
    assert (tmp_path / "ran").read_text().split().count("bad") == RUN_AGAIN + 1


def test_tests_that_end_their_process_or_hang_are_named_and_the_others_run(tmp_path: Path) -> None:
    tests = """
@pytest.mark.parametrize("n", range(4))
def test_it(n):
    if n == 1: os._exit(9)
    if n == 2: time.sleep(3600)
"""
    code, lines = run(tmp_path, tests, "-m", "pytest", "-n", "2", *SPREAD)
    assert code == 1
    for fatal in (1, 2):
        assert any(
            f"crashed while running 'test_it.py::test_it[{fatal}]'" in each for each in lines
        )
    assert "2 failed, 2 passed" in lines[-1]
