"""scripts/test: what fails is run once more, and what passes then is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_parts.__main__ import RUN_AGAIN

pytestmark = pytest.mark.soak

SCRIPTS = Path(__file__).parents[1] / "scripts"
PROGRAM = """
import sys
from pathlib import Path
from test_parts.__main__ import Run
run = Run(Path.cwd())
code = run.tests(["--numprocesses", "0", *sys.argv[1:]])
print(run.summary(1.0))
sys.exit(code)
"""
CONFTEST = """
import pytest
from pathlib import Path

def pytest_addoption(parser):
    parser.addoption("--alone")

def pytest_collection_modifyitems(config, items):
    alone = config.option.alone
    items[:] = [i for i in items if not alone or ("alone" in i.name) == (alone == "only")]

def fails(name, times):
    with Path("ran").open("a") as ran:
        ran.write(f"{name} ")
    assert Path("ran").read_text().split().count(name) > times

@pytest.fixture
def late():
    yield
    fails("late", 1)
"""


def run(folder: Path, tests: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q -p no:cacheprovider -p xdist.plugin")
    (folder / "test_it.py").write_text(f"import pytest\nfrom conftest import fails\n{tests}")
    command = [sys.executable, "-c", PROGRAM, *arguments]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the other plugins take seconds to import
    own["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), own.get("PYTHONPATH", "")])
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False)


def test_what_passes_the_second_time_is_flaky_and_the_run_passes(tmp_path: Path) -> None:
    tests = """
def test_alone(): fails("alone", 1)
def test_good(): fails("good", 0)
def test_torn_down(late): pass
@pytest.mark.parametrize("text", ["a b", "é::["])
def test_once(text): fails(ascii(text).replace(" ", ""), 1)
@pytest.mark.skip
def test_skipped(): pass
"""
    found = run(tmp_path, tests, "test_it.py")
    assert found.returncode == 0, found.stdout
    *flaky, last = found.stdout.splitlines()[-5:]
    assert {line.partition("::")[2] for line in flaky if line.startswith("flaky: ")} == {
        "test_alone",
        "test_torn_down",
        "test_once[a b]",
        "test_once[\\xe9::[]",
    }
    assert last == "5 passed, 1 skipped in 1.00s"
    ran = (tmp_path / "ran").read_text().split()
    assert ran.count("good") == 1
    assert ran.index("alone") == 4, "after the others"


def test_what_fails_twice_has_failed(tmp_path: Path) -> None:
    tests = 'def test_bad(): fails("bad", 2)\ndef test_once(): fails("once", 1)\n'
    found = run(tmp_path, tests)
    assert found.returncode == 1
    assert found.stdout.splitlines()[-3:] == [
        "FAILED test_it.py::test_bad",
        "flaky: test_it.py::test_once",
        "1 passed, 1 failed in 1.00s",
    ]


def test_much_that_fails_is_not_run_again(tmp_path: Path) -> None:
    tests = f"""
@pytest.mark.parametrize("n", range({RUN_AGAIN + 1}))
def test_bad(n): fails("bad", 999)
"""
    found = run(tmp_path, tests)
    assert found.returncode == 1
    assert found.stdout.splitlines()[-1] == f"{RUN_AGAIN + 1} failed in 1.00s"
    assert (tmp_path / "ran").read_text().split().count("bad") == RUN_AGAIN + 1


@pytest.mark.parametrize(
    ("tests", "arguments", "code"),
    [("", (), 5), ("syntax error", (), 2), ("", ("nowhere.py",), 4)],
    ids=["no tests", "no Python", "no file"],
)
def test_other_ends_have_the_exit_code_of_pytest(
    tmp_path: Path, tests: str, arguments: tuple[str, ...], code: int
) -> None:
    assert run(tmp_path, tests, *arguments).returncode == code
