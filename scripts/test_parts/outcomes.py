"""Collects the outcome of each test of one run of pytest in a file, for the run as a whole."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

import pytest

COUNTED = ("skipped", "xfailed", "xpassed")


@dataclass
class Outcomes:
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """The failed tests, also those whose fixtures failed, and files that could not be collected."""
    counts: dict[str, int] = field(default_factory=dict)
    """The number of tests with each other outcome."""
    paths: list[str] = field(default_factory=list)
    """The arguments of pytest that name files, folders or tests."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long a case of each test function takes on average."""

    @classmethod
    def read(cls, path: Path) -> "Outcomes":
        return cls(**json.loads(path.read_text()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="Write every test's outcome to this JSON file.")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Writes the file. Only the process that reports has a terminal and calls this."""
    path: Path | None = config.option.outcomes
    if not path:
        return

    def ids(*outcomes: str) -> list[str]:
        reports = (each for name in outcomes for each in terminalreporter.stats.get(name, ()))
        return list(dict.fromkeys(report.nodeid for report in reports))

    found = Outcomes(ids("passed"), ids("failed", "error"))
    found.counts = {name: len(terminalreporter.stats.get(name, ())) for name in COUNTED}
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        found.paths = list(config.args)
    passed = terminalreporter.stats.get("passed", ())
    found.seconds = seconds_of((report.nodeid, report.duration) for report in passed)
    path.write_text(json.dumps(asdict(found)))


def seconds_of(cases: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Returns how long a case of each test function takes on average."""
    durations = defaultdict[str, list[float]](list)
    for case, seconds in cases:
        durations[case.partition("[")[0]].append(seconds)
    return {test: round(mean(each), 3) for test, each in durations.items()}
