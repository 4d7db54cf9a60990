"""Whether the engine process is dead, or only slow: judged from its heartbeat, the processor time
that it uses and its state.

Why the limits hold on a Mac: seconds are counted in checks that the server itself was awake for, so
neither a laptop's sleep nor a server starved of processor time adds to them. Decompressing pages
and freeing memory use processor time, and reading pages from disk counts as page-ins: a process
that does any of these is not still.
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from mlx_server.engine.messages import IDLE, IMPORTING, Heartbeat

LOOK_SECONDS = 0.7
"""Interval of the checks, a little longer than that of heartbeats: a process that sends those is
not examined further."""

SILENT_SECONDS = 2.0
"""Limit on silence while the process does nothing at all or is stopped. Heartbeats come every half
second from a thread that needs microseconds. They stop where a call keeps the GIL, which uses the
processor or reads pages, or where all threads are stopped or deadlocked, which does neither."""

IMPORT_SECONDS = 30.0
"""Limit on silence while MLX is imported: macOS verifies a new library in another process before it
lets ours continue, and a disk may have to spin up."""

STALLED_SECONDS = 5.0
"""Limit on one step, and on silence while the processor works. Steps take 10 to 500 ms on a Mac,
and macOS itself stops GPU work that takes some seconds. A machine with slow steps gets five times
its longest step. A step after a rest or a wake gets FIRST_STEP_SECONDS (see heartbeat)."""

FIRST_STEP_SECONDS = 60.0
"""Limit on steps that do something for the first time: a model's first steps compile its kernels, a
load reads from disk, the first step after a rest brings back what was compressed or paged out
(60 GB at 3 GB/s take 20 s), and an unload frees as much. It also applies to a process that is
starved of processor time."""

STILL_SHARE = 0.08
"""A share of a processor. A step that waits for a GPU or a lock uses less, as do the threads that
wait for the GIL in a deadlock (2 to 4 % each). A process that uses more works, or is starved; so
does one that uses less and is runnable, as on two cores that forty processes want."""

State = Literal["running", "stopped"]


@dataclass(frozen=True)
class Vitals:
    """The state of a process as the operating system reports it."""

    state: State
    work: float
    """Seconds of processor time plus page-ins: it grows while the process does anything."""
    processor: float
    """Seconds of processor time."""
    runnable: bool
    """Whether a thread is runnable but not scheduled, or waits for the disk."""
    threads: Mapping[str, float] = field(default_factory=dict)
    """Each thread's seconds of processor time, on Linux."""

    def work_since(self, before: "Vitals") -> float:
        """On Linux that of the busiest thread: all threads that wait for the GIL poll it, and
        together may use a tenth of a processor in a deadlock."""
        if not self.threads:
            return self.work - before.work
        return max(used - before.threads.get(id, 0.0) for id, used in self.threads.items())


def is_stuck_in_step(heartbeat: Heartbeat, is_runnable: Callable[[], bool]) -> bool:
    """Whether a step has taken so long that it is not expected to end.

    One that computes is judged by the time that its busiest thread was given, since others may take
    most of the processors; one that does nothing, by the clock. is_runnable: looks up
    `Vitals.runnable`; called only if the step has hardly used a processor.
    """
    longest, took = heartbeat.longest_seconds, heartbeat.step_seconds
    patience = max(STALLED_SECONDS, 5 * longest) if longest else FIRST_STEP_SECONDS
    computed = heartbeat.processor_seconds
    if took <= patience:
        return False
    if computed > patience or took > max(patience, FIRST_STEP_SECONDS):
        return True
    return computed <= STILL_SHARE * took and not is_runnable()


class Liveness:
    """Judges one process: call `record` after each of its reports, and `look` at regular times."""

    def __init__(self) -> None:
        self._heartbeat: Heartbeat | None = None
        self.silent = 0.0
        self._still = 0.0
        self._before: Vitals | None = None
        self._worked = 0.0
        """Seconds of processor time since the last report."""

    @property
    def doing(self) -> str:
        return self._heartbeat.doing if self._heartbeat else "starting"

    def record(self, heartbeat: Heartbeat | None = None) -> None:
        self._heartbeat = heartbeat or self._heartbeat or Heartbeat(0.0, 0.0)
        self.silent = self._still = self._worked = 0.0
        self._before = None

    def look(self, elapsed: float, now: Vitals) -> str | None:
        """Returns why the process has to be abandoned, or None. elapsed: seconds since the last
        look."""
        seconds = min(elapsed, 2 * LOOK_SECONDS)
        self.silent += seconds
        before, self._before = self._before, now
        moved = before is not None and now.work_since(before) > STILL_SHARE * seconds
        # One sample may be chance: a thread that waits for the GIL polls it 2000 times a second.
        starved = before is not None and before.runnable and now.runnable
        # A runnable thread gets some processor time within this limit.
        starved = starved and self.silent < 2 * STALLED_SECONDS
        if now.state != "stopped" and (moved or starved):
            self._still = 0.0
        else:
            self._still += seconds
        self._worked += now.processor - before.processor if before else 0.0
        return self._verdict(now)

    def _verdict(self, now: Vitals) -> str | None:
        if now.state == "stopped":
            return "was stopped" if self._still >= SILENT_SECONDS else None
        if self._heartbeat is None:  # the interpreter is starting, which START_SECONDS limits
            return None
        quiet = IMPORT_SECONDS if self.doing == IMPORTING else SILENT_SECONDS
        if self._still >= quiet:
            return "stopped answering"
        patience = STALLED_SECONDS if self._heartbeat.longest_seconds else FIRST_STEP_SECONDS
        looping = min(self.silent, self._worked) >= patience
        if looping or self.silent >= max(FIRST_STEP_SECONDS, quiet):
            return "is stuck"
        return None


RUNNABLE = frozenset("RD")
"""Linux's state letters of a runnable thread and of one that waits for the disk."""


def vitals(pid: int) -> Vitals | None:
    """Returns None if there is no such process, or no free descriptor to look at it."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            times = process.cpu_times()
            pageins = getattr(process.memory_info(), "pageins", 0)  # on a Mac
        threads, runnable = _threads(pid) if sys.platform == "linux" else ({}, False)
    except (psutil.Error, OSError):
        return None
    processor = times.user + times.system
    state: State = "stopped" if stopped else "running"
    return Vitals(state, processor + pageins, processor, runnable, threads)


def _threads(pid: int) -> tuple[dict[str, float], bool]:
    """Returns each thread's seconds of processor time, and whether any is runnable or waits for the
    disk; psutil knows the first thread only."""
    used, states = dict[str, float](), set[str]()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # a thread that has ended
            state, *fields = stat.read_text().rpartition(")")[2].split()
            used[stat.parent.name] = (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")
            states.add(state)
    return used, bool(states & RUNNABLE)


LONG_SECONDS = 2.0

USUAL = frozenset({IDLE, "generating"})


class EngineActivity:
    def __init__(self) -> None:
        self.what = "starting"
        self._since: float | None = None
        self._reported = False

    def seconds(self, now: float) -> float:
        return 0.0 if self._since is None else now - self._since

    def report(self, what: str, now: float) -> str | None:
        """Returns a line to log when `what` has taken long, or when a long activity has ended."""
        if self._since is None:
            self._since = now
        if what == self.what:
            if self._reported or what in USUAL or self.seconds(now) < LONG_SECONDS:
                return None
            self._reported = True
            return f"the engine has been {what} for {self.seconds(now):.0f} s"
        line = f"{self.what} took {self.seconds(now):.1f} s" if self._reported else None
        self.what, self._since, self._reported = what, now, False
        return line
