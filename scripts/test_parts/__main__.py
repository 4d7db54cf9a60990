"""The parts of scripts/test: the tests that run next to each other and the checks that run
meanwhile, the tests that run alone, and a second run of failed tests."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from test_parts.scheduling import SILENCE_SECONDS

SCRIPTS = Path(__file__).parents[1]
COMPILED = SCRIPTS.parent / "tests" / "__pycache__"
"""Exists if tests have run before in this folder."""
SLOW_FOLDERS = ("tests/hostile", "tests/live")
"""Nearly all of their tests start servers, engines or other processes."""
MOST_PROCESSES = 4
SPREAD = ("--dist", "loadfile", "--no-loadscope-reorder")
PROCESSES = min((os.cpu_count() or 1) + 1, MOST_PROCESSES)
"""One more than there are cores, since tests wait for the servers that they start."""
MOST_ALONE = 2
"""Of tests that look at a clock or a load: most of them measure a process's own time, so that a
second one on another core changes little. What fails nevertheless runs again by itself."""
MEASURED = ("-m", "slipcover", "--json", "--fail-under", "0", "--out")
"""The command that measures a part's coverage at little cost, without the file for its result."""
ALLOCATOR = find_library("jemalloc") if sys.platform == "linux" else None
"""Faster than glibc's. Tests that run alone have the system's own, as some measure memory."""
RUN_AGAIN = 20
"""If more tests than this have failed, none is run again: chance does not break so many."""
PASSED, FAILED, NO_TESTS, INTERRUPTED = 0, 1, 5, 130
ENDED = (PASSED, FAILED, NO_TESTS)


@dataclass(frozen=True)
class Run:
    """One run of scripts/test."""

    folder: Path
    arguments: Sequence[str]
    takes_slow: bool
    measures: bool = False
    """Whether it measures how much of the code the tests run."""

    @property
    def coverage(self) -> Path:
        return self.folder / "coverage.json"

    def side_by_side(self) -> int:
        if not COMPILED.exists():  # otherwise each process would, as they all start by that
            compile_tests(self.arguments)
        options = ["-n", str(PROCESSES), *SPREAD]
        under = [*MEASURED, str(self.coverage)] if self.measures else []
        if self.measures:  # this comes before our own plugin, which imports the measured modules
            options = ["-p", "slipcover", *options]
        return self._pytest("side by side", "not alone", options, under, ALLOCATOR)

    def alone(self) -> int:
        return self._pytest("alone", "alone", ["-n", str(min(PROCESSES, MOST_ALONE)), *SPREAD])

    def again(self) -> int:
        title = f"once more what failed ({len(self.failed())})"
        return self._pytest(title, "", ["--last-failed"])

    def failed(self) -> set[str]:
        """The tests that failed when they ran last, as pytest keeps them for --last-failed."""
        path = self.folder / "v" / "cache" / "lastfailed"
        return set(json.loads(path.read_text())) if path.exists() else set()

    def _pytest(
        self,
        title: str,
        marks: str,
        options: Sequence[str],
        under: Sequence[str] = (),
        library: str | None = None,
    ) -> int:
        """under: the modules and options with which Python runs it. library: what its processes
        load first."""
        sys.stdout.write(f"== pytest, {title}\n")
        sys.stdout.flush()
        if not self.takes_slow:
            marks = "not alone and not slow"
            options = [*options, *(f"--ignore={folder}" for folder in SLOW_FOLDERS)]
        loaded = ":".join(filter(None, (library, os.environ.get("LD_PRELOAD"))))
        environment = os.environ | ({"LD_PRELOAD": loaded} if loaded else {})
        own = ["-p", "test_parts.scheduling", "-rsfE", "-o", f"cache_dir={self.folder}"]
        own += ["-m", marks, *options]
        command = [sys.executable, *under, "-m", "pytest", *own, *self.arguments]
        return subprocess.call(command, env=environment)


def wait(process: "subprocess.Popen[bytes]", what: str) -> int:
    """Returns the exit code, and says meanwhile what it waits for."""
    began = time.monotonic()
    while True:
        try:
            return process.wait(SILENCE_SECONDS)
        except subprocess.TimeoutExpired:
            sys.stdout.write(f"... {what}, {time.monotonic() - began:.0f} s\n")
            sys.stdout.flush()


def compile_tests(arguments: Sequence[str]) -> None:
    """By pytest, which runs none of them: of all tests two processes compile a half each."""
    files = sorted(map(str, COMPILED.parent.glob("**/test_*.py")))
    parts = [arguments] if arguments else [files[::2], files[1::2]]
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-qq"]
    processes = [subprocess.Popen([*collect, *part], stdout=subprocess.DEVNULL) for part in parts]
    for process in processes:
        wait(process, "compiling the tests")


def run_all(run: Run, before_alone: Callable[[], object]) -> int:
    """Runs all parts; returns the exit code."""
    codes = [run.side_by_side()]
    if run.takes_slow and codes[0] in ENDED:
        before_alone()
        codes.append(run.alone())
    if codes[-1] not in ENDED:
        return codes[-1]
    failed = run.failed()
    if 0 < len(failed) <= RUN_AGAIN:
        run.again()
    still_failed = run.failed()
    lines = [f"FAILED {each}" for each in sorted(still_failed)]
    lines += [f"flaky: {each}" for each in sorted(failed - still_failed)]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if failed:
        return FAILED if still_failed else PASSED
    return FAILED if FAILED in codes else min(codes)


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
        code = wait(self._process, "waiting for scripts/check")
        if self._output.exists():
            sys.stdout.write(self._output.read_text("utf-8", "replace"))
            sys.stdout.flush()
            self._output.unlink()
        return code


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
    wants_all, measures = "--all" in arguments, "--coverage" in arguments
    arguments = [each for each in arguments if each not in ("--all", "--coverage")]
    names_tests = any(Path(each.partition("::")[0]).exists() for each in arguments)
    interrupted = threading.Event()
    # the child processes get the signal too, and end by themselves
    signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), arguments, takes_slow=wants_all or names_tests, measures=measures)
        checks = Checks(run.folder)
        code = run_all(run, before_alone=checks.wait)
        checked = checks.wait()
        if measures and not interrupted.is_set():
            checked = checked or not is_covered(run.coverage)
    if interrupted.is_set():
        return INTERRUPTED
    if checked:
        sys.stdout.write("scripts/check failed or too little is covered, see above.\n")
    code = code or int(checked)
    sys.stdout.write(f"{'failed' if code else 'passed'} in {time.monotonic() - began:.0f} s\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
