"""Processes that take each other's place, and what SIGHUP means to the first one."""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest

from mlx_server.errors import ServerError, SettingsError
from mlx_server.system import handover
from mlx_server.system.handover import Launcher, Succession

SUCCESSOR = """
import os, sys
from threading import Event
from mlx_server.system.handover import launcher
first, over = launcher(), Event()
(listening,) = first.inherited("here")
if os.path.exists(sys.argv[1]):
    first.say("failed", "It is wrong.")
    sys.exit(2)
first.say("ready")
first.watch(lambda successor: over.set(), over.set)
over.wait()
"""


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def succession_on(
    listening: socket.socket, folder: Path, on_replaced: Callable[[socket.socket], None]
) -> Succession:
    command = [sys.executable, "-c", SUCCESSOR, str(folder / "wrong")]
    sockets = [os.dup(listening.fileno())]
    return Succession("here", sockets, command, str(folder), on_replaced=on_replaced)


def test_one_process_after_another_has_the_sockets(
    listening: socket.socket, tmp_path: Path
) -> None:
    replaced = Event()

    def leave(successor: socket.socket) -> None:
        successor.close()
        replaced.set()

    succession = succession_on(listening, tmp_path, leave)
    before = signal.signal(signal.SIGHUP, lambda *_: succession.hung_up(pytest.fail))
    try:
        (tmp_path / "wrong").touch()
        with pytest.raises(ServerError, match=r"goes on\. It is wrong\."):
            handover.ask(tmp_path, os.getpid())
        assert not replaced.is_set()
        (tmp_path / "wrong").unlink()
        # the pipe of one who was killed while he waited
        os.mkfifo(handover.reply_file(tmp_path, os.getpid()))
        assert "takes the requests" in handover.ask(tmp_path, os.getpid())
        assert replaced.wait(30)
        (first,) = succession.children
        assert "takes the requests" in handover.ask(tmp_path, os.getpid())
        assert first not in succession.children[:1]
        succession.command = ["/none/such"]
        with pytest.raises(ServerError, match="can't be started"):
            handover.ask(tmp_path, os.getpid())
        assert [*tmp_path.iterdir()] == []
    finally:
        signal.signal(signal.SIGHUP, before)
        succession.stop()
        succession.here_ended(then=succession.run)
    assert (succession.children, succession.code) == ([], 0)


@pytest.mark.parametrize(
    ("had", "has", "ignores", "stops"),
    [(True, False, False, True), (True, False, True, False), (True, True, True, False)],
)
def test_a_terminal_that_is_closed_asks_for_no_restart(
    listening: socket.socket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    had: bool,
    has: bool,
    ignores: bool,
    stops: bool,
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores else signal.SIG_DFL)
    try:
        monkeypatch.setattr(handover, "has_terminal", lambda: had)
        succession = succession_on(
            listening, tmp_path, lambda _: pytest.fail("it is not asked for one")
        )
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as in a program that was executed
        later = Succession.continued(json.loads(json.dumps(succession.state())))
        monkeypatch.setattr(handover, "has_terminal", lambda: has)
        for each in succession, later:
            stopped = Event()
            each.hung_up(stopped.set)
            assert stopped.is_set() == stops
            assert not each.children
        succession.stop()
        for each in succession, later:
            each.here_ended()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_address_is_refused() -> None:
    own, other = socket.socketpair()
    with own, other, pytest.raises(SettingsError, match="change it back"):
        Launcher(1, 1, "here", [], own).inherited("there")
