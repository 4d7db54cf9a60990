"""Whether the engine process is dead, or only slow: judged from its heartbeat, the processor time
that it uses and its state.

Why the limits hold on a Mac. Seconds are counted in looks that the server itself was awake for, so
neither a laptop's sleep nor a server that was starved of time adds to them. Decompressing pages and
freeing memory use processor time, and reading pages from the disk counts as page-ins: a process
that does any of it is not still.
"""

from dataclasses import dataclass
from typing import Literal

from mlx_server.engine.messages import IMPORTING, Heartbeat

LOOK_SECONDS = 0.7
"""A little more than a beat takes: of a process that beats, nothing else is looked at."""

SILENT_SECONDS = 2.0
"""Without a word, while the process does nothing at all or is stopped. Beats come every half second
from a thread that needs microseconds. It is silent where a call keeps the GIL, which uses the
processor or reads pages, or where all threads are stopped or deadlocked, which do neither."""

IMPORT_SECONDS = 30.0
"""The same, while MLX is imported for the first time: macOS checks a new library in another
process before it lets ours go on, and a disk may have to spin up."""

STALLED_SECONDS = 5.0
"""In one step, or without a word while the processor works. Steps take 10 to 500 ms on a Mac, and
macOS itself stops GPU work that takes some seconds. A machine on which whole steps take long gets
five times its longest. A step after a rest or a wake gets FIRST_STEP_SECONDS (see heartbeat)."""

FIRST_STEP_SECONDS = 60.0
"""The first steps of a model compile its kernels, a load reads from the disk, a first step after a
rest brings back what was compressed or paged out (60 GB at 3 GB/s are 20 s), and an unload frees
as much. Also the most that a process gets that is starved of processor time."""

STILL_SHARE, STARVED_SHARE = 0.08, 0.5
"""Of a processor. A step that waits for a GPU or a lock uses less than the first, and so do the
threads that wait for the GIL in a deadlock, 2 to 4 % each; one that computes or loops for ever uses
more than the second. In between it works, but others get most of the time."""

State = Literal["running", "stopped"]


@dataclass(frozen=True)
class Vitals:
    """Of a process, as the system sees it."""

    state: State
    work: float
    """Seconds of processor time and page-ins, summed up: it grows while the process does anything.
    """
    processor: float
    """Seconds of processor time."""
    wants: bool
    """Some thread of it could run and is not let, or waits for the disk."""


def is_stuck_in_step(heartbeat: Heartbeat) -> bool:
    """Whether a step has taken so long that no other end of it is to be expected."""
    longest = heartbeat.longest_seconds
    patience = max(STALLED_SECONDS, 5 * longest) if longest else FIRST_STEP_SECONDS
    if heartbeat.step_seconds <= patience:
        return False
    starved = STILL_SHARE < heartbeat.processor_seconds / heartbeat.step_seconds < STARVED_SHARE
    return not starved or heartbeat.step_seconds > max(patience, FIRST_STEP_SECONDS)


class Liveness:
    """Looks at regular times; `heard` whenever the process has said something since the last."""

    def __init__(self) -> None:
        self._heartbeat: Heartbeat | None = None
        self.silent = 0.0
        self._still = 0.0
        self._before: Vitals | None = None
        self._worked = 0.0
        """Processor time since it became silent."""

    @property
    def doing(self) -> str:
        return self._heartbeat.doing if self._heartbeat else "starting"

    def record(self, heartbeat: Heartbeat | None = None) -> None:
        self._heartbeat = heartbeat or self._heartbeat or Heartbeat(0.0, 0.0)
        self.silent = self._still = self._worked = 0.0
        self._before = None

    def look(self, elapsed: float, now: Vitals) -> str | None:
        """Why the process is to be given up, if it is. elapsed: since the last look."""
        seconds = min(elapsed, 2 * LOOK_SECONDS)
        self.silent += seconds
        before, self._before = self._before, now
        moved = before is not None and now.work - before.work > STILL_SHARE * seconds
        # once is chance: what waits for the GIL looks for it two thousand times a second
        starved = before is not None and before.wants and now.wants
        starved = starved and self.silent < 2 * STALLED_SECONDS  # who wants gets some by then
        if now.state != "stopped" and (moved or starved):
            self._still = 0.0
        else:
            self._still += seconds
        self._worked += now.processor - before.processor if before else 0.0
        return self._verdict(now)

    def _verdict(self, now: Vitals) -> str | None:
        if now.state == "stopped":
            return "was stopped" if self._still >= SILENT_SECONDS else None
        if self._heartbeat is None:  # an interpreter that starts; the start has a limit of its own
            return None
        quiet = IMPORT_SECONDS if self.doing == IMPORTING else SILENT_SECONDS
        if self._still >= quiet:
            return "stopped answering"
        patience = STALLED_SECONDS if self._heartbeat.longest_seconds else FIRST_STEP_SECONDS
        looping = min(self.silent, self._worked) >= patience
        if looping or self.silent >= max(FIRST_STEP_SECONDS, quiet):
            return "is stuck"
        return None
