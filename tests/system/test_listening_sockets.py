"""Sockets that can't be had, and the words for it; processes that take each other's place."""

import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from threading import Event

import pytest

from mlx_server.errors import ServerError, SettingsError
from mlx_server.system import handover
from mlx_server.system.handover import Launcher, LogOptions, Succession
from mlx_server.system.listening_sockets import bound_sockets, url_of


def close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def test_a_name_is_bound_at_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))
        for address in ("127.0.0.1", "127.0.0.2", "127.0.0.1")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    sockets = bound_sockets("here", 0)
    assert [each.getsockname()[0] for each in sockets] == ["127.0.0.1", "127.0.0.2"]
    assert url_of(sockets[1]).startswith("http://127.0.0.2:")
    close(sockets)


def test_a_port_in_use_names_the_next_one_and_how_to_find_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"--port {port + 1}.*lsof -nP -i :{port}"):
            bound_sockets("127.0.0.1", port)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EACCES, "above 1023"),
        (errno.EADDRNOTAVAIL, "not have the address 127.0.0.1"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_other_refusals_are_said_in_words(
    code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> socket.socket:
        raise OSError(code, "as the system says it")

    monkeypatch.setattr("mlx_server.system.listening_sockets._bound", refuse)
    with pytest.raises(SettingsError, match=words):
        bound_sockets("127.0.0.1", 80)


def test_a_host_that_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(SettingsError, match=r"not known.*--host"):
        bound_sockets("studio.local", 80)


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


def test_after_an_upgrade_the_state_of_an_older_process_is_read() -> None:
    ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
    serving, leaving = ([pid, each.detach()] for pid, each in enumerate(ours, 10))
    names = "address sockets command folder generation code deadline reply ignores_hangup stopping"
    kept = dict(
        zip(names.split(), ("here", [], ["/new"], "/", 2, 0, 7.5, None, True, True), strict=True)
    )
    children = {"serving": serving, "starting": None, "leaving": [leaving]}
    state = {**kept, **children, "log": asdict(LogOptions())}
    later = Succession.continued(state)
    assert json.loads(json.dumps(later.state())) == state
    for each in (*theirs, *(child.channel for child in later.children)):
        each.close()
    later.here_ended(then=lambda: None)


def test_another_address_is_refused() -> None:
    own, other = socket.socketpair()
    with own, other, pytest.raises(SettingsError, match="change it back"):
        Launcher(1, 1, "here", [], own).inherited("there")
