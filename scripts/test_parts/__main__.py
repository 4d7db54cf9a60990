"""The parts of scripts/test: the tests that run next to each other and the checks that run
meanwhile, the tests that run alone, and a second run of failed tests.

It ends with a line like pytest's own, which counts all parts.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes.util import find_library
from dataclasses import dataclass, field
from pathlib import Path

from test_parts.outcomes import Outcomes

SCRIPTS = Path(__file__).parents[1]
COMPILED = SCRIPTS.parent / "tests" / "__pycache__"
"""Exists if tests have run before in this folder."""
MOST_PROCESSES = 4
SPREAD = ("-p", "test_parts.scheduling", "--dist", "loadfile", "--no-loadscope-reorder")
SIDE_BY_SIDE = (*SPREAD, "--alone=without")
IN_ONE_PROCESS = ("--numprocesses", "1", *SPREAD)
"""Options for a single worker process outside pytest's own: the run goes on if a test ends its
process."""
ONE_EACH = ("--numprocesses", str(min(2, os.cpu_count() or 1)), *SPREAD)
"""Options for tests that look at a clock or a load: most of them measure a process's own time, so
that a second one on another core changes little. What fails nevertheless runs again in one."""
MEASURED = ("-m", "slipcover", "--json", "--fail-under", "0", "--out")
"""The command that measures a part's coverage at little cost, without the file for its result."""
ALLOCATOR = find_library("jemalloc") if sys.platform == "linux" else None
"""Faster than glibc's. Tests that run alone have the system's own, as some measure memory."""
RUN_AGAIN = 20
"""If more tests than this have failed, none is run again: chance does not break so many."""
EVERY_CASE, RECORD = "--every-case", "--record-slow"
"""Options that run all tests; the second one also writes SLOW."""
SLOW, SLOW_SECONDS = SCRIPTS.parent / "tests" / "slow.txt", 0.1
"""The file of the test functions that scripts/test leaves out, and how long a case of theirs takes
on average."""
PASSED, FAILED, NO_TESTS, INTERRUPTED = 0, 1, 5, 130


def processes() -> tuple[str, str]:
    """Returns options of xdist: a process for each core. One more would wait less, but collects all
    tests once more."""
    return "--numprocesses", str(min(os.cpu_count() or 1, MOST_PROCESSES))


@dataclass
class Run:
    """One run of scripts/test, and what its parts have found so far."""

    folder: Path
    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    flaky: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    interrupted: bool = False
    before_alone: Callable[[], object] = lambda: None
    """Waits for what shares the processor with the tests that run side by side."""

    @property
    def coverage(self) -> Path:
        return self.folder / "coverage.json"

    def pytest(
        self,
        title: str,
        arguments: Sequence[str],
        under: Sequence[str] = (),
        library: str | None = None,
    ) -> tuple[int, Outcomes]:
        """Runs pytest; returns its exit code, and the outcome of every test. under: the modules and
        options with which Python runs it. library: what its processes load first."""
        sys.stdout.write(f"== pytest, {title}\n")
        sys.stdout.flush()
        path = self.folder / "outcomes.json"
        path.unlink(missing_ok=True)
        # the second -q omits pytest's last line, which would count this part alone
        own = ["-q", "-p", "test_parts.outcomes", "--outcomes", str(path)]
        loaded = ":".join(filter(None, (library, os.environ.get("LD_PRELOAD"))))
        environment = os.environ | ({"LD_PRELOAD": loaded} if loaded else {})
        command = [sys.executable, *under, "-m", "pytest", *own, *arguments]
        code = subprocess.call(command, env=environment)
        return code, Outcomes.read(path) if path.exists() else Outcomes()

    def tests(self, arguments: Sequence[str]) -> int:
        """Runs the tests; returns the exit code."""
        if not COMPILED.exists():
            self._compile(arguments)
        codes = []
        paths: list[str] = []
        measured = [] if is_daily(arguments) else [*MEASURED, str(self.coverage)]
        side_by_side = [*processes(), *SIDE_BY_SIDE, *arguments]
        if measured:  # this comes before our own plugin, which imports the measured modules
            side_by_side += ["-p", "slipcover"]
        alone = [*arguments, *ONE_EACH, "--alone=only"]
        for title, part, under, library, before in (
            ("side by side", side_by_side, measured, ALLOCATOR, lambda: None),
            ("alone", alone, [], None, self.before_alone),
        ):
            before()
            code, found = self.pytest(title, part, under, library)
            self._add(found)
            paths += found.paths
            codes.append(code)
            if code not in (PASSED, FAILED, NO_TESTS):
                return code
        if self.failed:
            self._again([each for each in arguments if each not in paths])
            return FAILED if self.failed else PASSED
        return FAILED if FAILED in codes else min(codes)

    def _compile(self, arguments: Sequence[str]) -> None:
        """Compiles all tests once; otherwise each process would, as they all start by that."""
        command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", *arguments]
        subprocess.call(command, stdout=subprocess.DEVNULL)

    def _again(self, options: Sequence[str]) -> None:
        if self.interrupted or len(self.failed) > RUN_AGAIN:
            return
        part = [*options, *IN_ONE_PROCESS, *sorted(self.failed)]
        _, found = self.pytest(f"once more what failed ({len(self.failed)})", part)
        self.flaky = self.failed & set(found.passed) - set(found.failed)
        self.failed -= self.flaky

    def _add(self, found: Outcomes) -> None:
        self.passed |= set(found.passed)
        self.failed |= set(found.failed)
        self.seconds |= found.seconds
        for name, number in found.counts.items():
            self.counts[name] = self.counts.get(name, 0) + number

    def summary(self, seconds: float) -> str:
        lines = [f"FAILED {each}" for each in sorted(self.failed)]
        lines += [f"flaky: {each}" for each in sorted(self.flaky)]
        passed = len((self.passed | self.flaky) - self.failed)
        counts = {"passed": passed, "failed": len(self.failed), **self.counts}
        shown = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        return "\n".join([*lines, f"{shown or 'no tests ran'} in {seconds:.2f}s"])


class Checks:
    """scripts/check, which runs during the tests and is printed when it has ended."""

    def __init__(self, folder: Path) -> None:
        self._output = folder / "checks.txt"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [SCRIPTS / "check"], stdout=output, stderr=subprocess.STDOUT
            )

    def wait(self) -> int:
        """Waits for the checks; returns the exit code."""
        code = self._process.wait()
        if self._output.exists():
            sys.stdout.write(self._output.read_text("utf-8", "replace"))
            sys.stdout.flush()
            self._output.unlink()
        return code


def is_daily(arguments: Sequence[str]) -> bool:
    return {"--all", EVERY_CASE}.isdisjoint(arguments)


def record_slow(seconds: Mapping[str, float]) -> None:
    """Writes SLOW, without what is in folders that scripts/test leaves out as a whole."""
    slow = sorted(test for test, each in seconds.items() if each >= SLOW_SECONDS)
    elsewhere = [test for test in slow if not test.startswith(("tests/hostile/", "tests/live/"))]
    SLOW.write_text("".join(f"{test}\n" for test in elsewhere))


def is_covered(measured: Path) -> bool:
    """Whether the tests ran as much of the packages as pyproject.toml requires. Prints the modules
    with less."""
    sys.stdout.write("== coverage\n")
    sys.stdout.flush()
    merged = measured.with_suffix(".merged")
    command = [sys.executable, "-m", "slipcover", "--out", str(merged), "--merge", str(measured)]
    return subprocess.call(command) == PASSED


def main(arguments: list[str]) -> int:
    began = time.monotonic()
    records = RECORD in arguments
    arguments = [EVERY_CASE if each == RECORD else each for each in arguments]
    with tempfile.TemporaryDirectory() as folder:
        checks = Checks(Path(folder))
        run = Run(Path(folder), before_alone=checks.wait)

        def interrupt(*_: object) -> None:
            """Records the signal. The child processes get it too, and end by themselves."""
            run.interrupted = True

        signal.signal(signal.SIGINT, interrupt)
        tests = run.tests(arguments)
        checked = checks.wait()
        if not run.interrupted and not is_daily(arguments):
            checked = checked or not is_covered(run.coverage)
    if records and not run.interrupted:
        record_slow(run.seconds)
    if checked and not run.interrupted:
        sys.stdout.write("scripts/check failed or too little is covered, see above.\n")
    sys.stdout.write(run.summary(time.monotonic() - began) + "\n")
    return INTERRUPTED if run.interrupted else tests or checked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
