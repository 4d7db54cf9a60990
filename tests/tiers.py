"""Which tests run: those for daily work, those that CI runs as well, or every case."""

from binascii import crc32
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SLOW_FOLDERS = ("hostile", "live")
"""The folders of which each test has the folder's name as a mark."""
SLOW_FILE = TESTS / "slow.txt"
"""The test functions of which a case takes long; `scripts/test --record-slow` writes it."""


@dataclass(frozen=True)
class Tier:
    without: frozenset[str]
    """The marks of tests that don't run."""
    one_in: int
    """Of this many cases of a test that is marked `tables` one runs."""

    def takes(self, folder: str) -> bool:
        return folder not in self.without


DAILY = Tier(frozenset({*SLOW_FOLDERS, "slow", "soak"}), one_in=32)
ALL = Tier(frozenset({"soak"}), one_in=16)
EVERY_CASE = Tier(frozenset(), one_in=1)


def add_options(group: pytest.OptionGroup) -> None:
    group.addoption("--all", action="store_true", help="Every test, with a part of long tables.")
    group.addoption("--every-case", action="store_true", help="Every case of every test.")


def tier_of(config: pytest.Config) -> Tier:
    """Whoever names a path gets all that is there."""
    has_paths = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if config.option.every_case or has_paths:
        return EVERY_CASE
    return ALL if config.option.all else DAILY


def left_out(tier: Tier, items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Marks what is slow, and returns the items that are not in the tier."""
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    return {item for test, cases in tests.items() for item in _left_out(tier, test, cases)}


def _left_out(tier: Tier, test: str, cases: list[pytest.Item]) -> set[pytest.Item]:
    folder = cases[0].path.relative_to(TESTS).parts[0]
    marks = {folder} & {*SLOW_FOLDERS} | ({"slow"} if test in _slow() else set())
    for case in cases:
        for mark in marks:
            case.add_marker(mark)
    kept = [case for case in cases if tier.without.isdisjoint(m.name for m in case.iter_markers())]
    return {*cases} - {*_part(tier, kept)}


def _part(tier: Tier, cases: list[pytest.Item]) -> list[pytest.Item]:
    """Of so many cases of a table in a row one, not always the first: parameters that are combined
    repeat themselves at even distances."""
    tables = [case for case in cases if case.get_closest_marker("tables")]
    rows = [tables[at : at + tier.one_in] for at in range(0, len(tables), tier.one_in)]
    without = {*tables} - {min(row, key=_by_chance) for row in rows}
    return [case for case in cases if case not in without]


def _by_chance(case: pytest.Item) -> int:
    return crc32(case.nodeid.encode())


@cache
def _slow() -> frozenset[str]:
    return frozenset(SLOW_FILE.read_text().split())
