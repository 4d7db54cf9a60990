"""Each test is in a tier, and the cases of a table are spread over it."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import test_parts.__main__ as runner
from test_parts.outcomes import seconds_of

from tests import tiers
from tests.tiers import ALL, DAILY, EVERY_CASE, SLOW_FILE, Tier, left_out

TESTS = """
import pytest

@pytest.mark.tables
@pytest.mark.parametrize("case", range(96))
def test_long_table(case): ...

@pytest.mark.tables
@pytest.mark.parametrize("case", range(3))
def test_short_table(case): ...

@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_lengths(case): ...

def test_slow(): ...
"""
NODE = "tests/test_it.py"
Taken = Callable[[Tier, str], dict[str, int]]


@pytest.fixture
def taken(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Taken:
    """How many cases of each test run, in a folder of the tests."""
    monkeypatch.setattr(tiers, "TESTS", tmp_path)
    monkeypatch.setattr(tiers, "_slow", lambda: {f"{NODE}::test_slow"})

    def count(tier: Tier, folder: str) -> dict[str, int]:
        path = tmp_path / folder / f"{tmp_path.name}_{folder}.py"  # a module's name is taken once
        path.parent.mkdir(exist_ok=True)
        path.write_text(TESTS)
        module = pytest.Module.from_parent(request.session, path=path, nodeid=NODE)
        items = [each for each in module.collect() if isinstance(each, pytest.Item)]
        kept = [item for item in items if item not in left_out(tier, items)]
        names = [item.name.partition("[")[0].removeprefix("test_") for item in kept]
        return {name: names.count(name) for name in names}

    return count


def test_a_part_of_a_long_table_and_nothing_slow(taken: Taken) -> None:
    assert taken(DAILY, "api") == {"long_table": 3, "short_table": 1, "lengths": 1}
    assert taken(DAILY, "live") == {}


@pytest.mark.parametrize("folder", ["api", "live", "hostile"])
def test_every_test_with_more_of_a_long_table(taken: Taken, folder: str) -> None:
    parts = {"long_table": 6, "short_table": 1, "lengths": 1, "slow": 1}
    assert taken(ALL, folder) == parts
    assert taken(EVERY_CASE, folder) == {
        "long_table": 96,
        "short_table": 3,
        "lengths": 2,
        "slow": 1,
    }


def test_slow_tests_are_recorded_by_the_average_of_their_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SLOW", tmp_path / "slow.txt")
    slow, quick = "tests/api/test_x.py::test_slow", "tests/api/test_x.py::test_quick"
    taken = {f"{slow}[a]": 0.5, f"{slow}[b]": 0.1, f"{quick}[a]": 0.15, f"{quick}[b]": 0.0}
    taken |= {"tests/live/test_x.py::test_slow": 9.0, "tests/hostile/test_x.py::test_slow": 9.0}
    runner.record_slow(seconds_of(taken.items()))
    assert (tmp_path / "slow.txt").read_text() == f"{slow}\n"


def test_slow_tests_exist() -> None:
    """A test that was renamed would run daily again."""
    lines = [line.split("::") for line in SLOW_FILE.read_text().splitlines()]
    texts = {path: (SLOW_FILE.parents[1] / path).read_text() for path, *_ in lines}
    assert lines
    for path, name, *_ in lines:
        assert re.search(rf"^(async )?def {name}\(|^{name} = ", texts[path], re.M), (path, name)
