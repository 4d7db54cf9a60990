"""Distributes tests over processes: whole files, so that a file's server serves all its tests. And
while nothing is heard of them for a while, a line says how far they are.

It does what xdist does, except for a process that is lost: xdist (3.8) queues all files of that
process again, also those that were done, and waits for ever for a process to which it sends no
tests.
"""

import threading
import time
from collections.abc import Sequence
from functools import cached_property

import pytest
from _pytest.runner import runtestprotocol
from xdist import is_xdist_worker
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

SLOW_FIXTURE_SECONDS = 1.0
"""Fixtures that take longer are reported, for pytest's list of the slowest."""

SILENCE_SECONDS = 15.0
"""After so long without a test that has ended, a line says how far the run is."""


class Progress:
    """Of the process that prints."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began = self._heard = time.monotonic()
        self._done = 0
        self._has_ended = threading.Event()

    def pytest_sessionstart(self) -> None:
        threading.Thread(target=self._tell, daemon=True).start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._heard = time.monotonic()
        self._done += report.when == "call"

    def pytest_sessionfinish(self) -> None:
        self._has_ended.set()

    def _tell(self) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        while not self._has_ended.wait(1.0):
            now = time.monotonic()
            if now - self._heard >= SILENCE_SECONDS and reporter:
                self._heard = now
                reporter.ensure_newline()
                line = f"... {self._done} tests have run in {now - self._began:.0f} s"
                reporter.write_line(line, flush=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    return Files(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Sends three messages about a test that passes; xdist's six take longer than a short test."""
    if not is_xdist_worker(item.session):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed or report.duration > SLOW_FIXTURE_SECONDS:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


class Files(LoadFileScheduling):
    """The files that no process has yet, and those that each process has."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Returns the test that ended its process, if one did. It has failed and is not tried
        again; the tests after it go to other processes."""
        left = {path: _to_do(tests) for path, tests in self.assigned_work.pop(node).items()}
        fatal = next((test for tests in left.values() for test in tests), None)
        for path, tests in left.items():
            tests.pop(fatal or "", None)
            if tests:
                self.workqueue[path] = tests
        for other in self.nodes:
            self._reschedule(other)
        return fatal

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        if node not in self.registered_collections:
            node.shutdown()  # it replaces another process, but found other tests

    def _reschedule(self, node: WorkerController) -> None:
        if node in self.registered_collections:
            super()._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        path, tests = self.workqueue.popitem(last=False)
        self.assigned_work[node][path] = tests
        node.send_runtest_some([self._places[test] for test in tests])

    @cached_property
    def _places(self) -> dict[str, int]:
        """Returns each test's position in the collection, which is the same in all processes."""
        return {test: place for place, test in enumerate(self.collection or ())}


def _to_do(tests: dict[str, bool]) -> dict[str, bool]:
    return {test: False for test, is_done in tests.items() if not is_done}
