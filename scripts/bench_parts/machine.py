"""Measures what other processes use of this machine: figures from a busy machine mean nothing."""

from time import perf_counter

import psutil


class Others:
    """The processor time of all other processes since this object was made."""

    def __init__(self) -> None:
        self._began, self._taken = perf_counter(), _taken_by_others()

    def cores(self) -> float:
        return (_taken_by_others() - self._taken) / (perf_counter() - self._began)


def _taken_by_others() -> float:
    times = psutil.cpu_times()
    us = psutil.Process()
    ours = [process.cpu_times() for process in (us, *us.children(recursive=True))]
    # the last two are times of children that have ended
    taken = sum(t.user + t.system + t.children_user + t.children_system for t in ours)
    return times.user + times.nice + times.system - taken
