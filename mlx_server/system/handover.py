"""Replaces a running server by a new process on the same sockets: `mlx-server restart`, or SIGHUP.

The process that was started first keeps its id, which the terminal and the service manager know. It
starts each further server as a child, and ends with the last one. Once its own answers have ended
it executes this module in its place, which holds the sockets and watches the children.

A new server says over a socket pair that it is ready, or why it can't serve. Only then is the one
before asked to leave: it takes no more connections, and ends when its answers have. When the other
end of its pair is closed a server stops, so none outlives the first process.
"""

import json
import logging
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from types import FrameType
from typing import Any, NoReturn

from mlx_server import limits
from mlx_server.errors import ServerError, SettingsError

log = logging.getLogger("mlx_server")

VARIABLE = "MLX_SERVER_HANDOVER"
"""Environment variable that tells a new server what the first process gives it."""

SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
MESSAGE_CHARACTERS = 4000
LEAVE, FOLLOW = b"l", b"f"
"""Each comes with a connection of the server that leaves to the one that takes its place."""

Leave = Callable[[socket.socket], None]

ASK_SECONDS = 1.0
"""After which a signal that was not acknowledged is sent again."""


@dataclass(frozen=True)
class Launcher:
    """The first process, as a server that it has started sees it."""

    pid: int
    generation: int
    address: str
    sockets: Sequence[int]
    channel: socket.socket
    predecessors: list[socket.socket] = field(default_factory=list)
    """A connection to the server before this one, once that leaves."""

    def inherited(self, address: str) -> list[socket.socket]:
        """Raises SettingsError if the server is to listen on another address now."""
        if address != self.address:
            raise SettingsError(
                f"The server listens on {self.address}, and its settings name {address} now. A "
                "restart keeps the address: change it back, or stop the server and start it again."
            )
        return [socket.socket(fileno=descriptor) for descriptor in self.sockets]

    def say(self, word: str, message: str = "") -> None:
        with suppress(OSError):  # it has ended
            line = json.dumps([word, message[:MESSAGE_CHARACTERS]])
            self.channel.sendall(line.encode() + b"\n")

    def watch(self, leave: Leave, stop: Callable[[], None]) -> None:
        """Calls one of these from a thread when it is time to."""
        threading.Thread(target=self._watch, args=(leave, stop), daemon=True).start()

    def _watch(self, leave: Leave, stop: Callable[[], None]) -> None:
        with suppress(OSError):
            while (received := socket.recv_fds(self.channel, 1, 1))[0]:
                word, (descriptor,), *_ = received
                os.set_inheritable(descriptor, False)
                other = socket.socket(fileno=descriptor)
                if word == LEAVE:
                    leave(other)
                else:
                    self.predecessors.append(other)
        stop()


@cache
def launcher() -> Launcher | None:
    """None in the first process."""
    text = os.environ.pop(VARIABLE, "")
    if not text:
        return None
    given = json.loads(text)
    for descriptor in (given["channel"], *given["sockets"]):
        os.set_inheritable(descriptor, False)
    return Launcher(**{**given, "channel": socket.socket(fileno=given["channel"])})


@contextmanager
def reported_refusal() -> Iterator[None]:
    """Reports to the process that is to be replaced why the settings are refused."""
    try:
        yield
    except ServerError as error:
        if first := launcher():
            first.say("failed", error.message)
        raise


@dataclass(eq=False)
class Successor:
    """A server that the first process has started."""

    pid: int
    channel: socket.socket
    process: "subprocess.Popen[bytes] | None" = None
    """None if it was started before this process became this program."""
    failure: str = ""
    unread: bytes = b""

    def lines(self) -> list[list[str]] | None:
        """What it has said since; None if it has ended."""
        try:
            received = self.channel.recv(1 << 16)
        except OSError:
            received = b""
        *lines, self.unread = (self.unread + received).split(b"\n")
        return [json.loads(line) for line in lines] if received else None

    def say(self, word: bytes, other: socket.socket) -> None:
        with suppress(OSError):
            socket.send_fds(self.channel, [word], [other.fileno()])

    def say_stop(self) -> None:
        with suppress(OSError):
            self.channel.shutdown(socket.SHUT_WR)

    def code(self) -> int:
        """The exit code of the process, as a shell would show it."""
        if self.process:
            code = self.process.wait()
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code if code >= 0 else 128 - code


def _followed(child: Successor) -> socket.socket:
    """A server's end of a connection whose other end the server gets that takes its place."""
    ours, theirs = socket.socketpair()
    with theirs:
        child.say(FOLLOW, theirs)
    return ours


@dataclass
class LogOptions:
    """The log options of the process that executes this module."""

    level: str = "info"
    format: str = "text"
    file: str | None = None


KEPT = (
    *("address", "sockets", "command", "folder", "generation", "code"),
    *("deadline", "reply", "ignores_hangup"),
)
"""What a succession keeps when its process executes this module. After an upgrade that process is
one of an older version: what `state` names may not get another name."""


@dataclass
class Succession:
    """The servers on some sockets: one serves, at most one starts, others end their answers.

    It runs in a thread of the first server from the first restart on, later as a program.
    """

    address: str
    sockets: list[int]
    command: list[str]
    folder: str
    """Where a client of `restart` waits for the reply."""
    log: LogOptions = field(default_factory=LogOptions)
    serves_here: bool = True
    """Whether this process's own server takes the connections."""
    generation: int = 0
    code: int = 0
    """The exit code: that of the last server that served."""
    deadline: float = 0.0
    """When the one that starts has to be ready."""
    reply: int | None = None
    """The pipe to the one who has asked for a restart."""
    is_stopping: bool = False
    ignores_hangup: bool = field(
        default_factory=lambda: signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    )
    on_replaced: Leave = lambda successor: successor.close()
    """Called in another thread whenever a new server has taken the place of the one before."""
    on_lost: Callable[[], None] = lambda: None
    """Called in another thread when there is no server left."""

    def __post_init__(self) -> None:
        self._serving: Successor | None = None
        self._starting: Successor | None = None
        self._leaving: list[Successor] = []
        self._thread: threading.Thread | None = None
        self._goes_on = True
        self._ears, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._selector = DefaultSelector()
        self._selector.register(self._ears, EVENT_READ)
        self._had_terminal = has_terminal()

    @property
    def children(self) -> list[Successor]:
        return [each for each in (self._serving, self._starting, *self._leaving) if each]

    def hung_up(self, stop: Callable[[], None]) -> None:
        """Handles SIGHUP: it asks for a restart, or tells that the terminal is gone."""
        is_end = self._had_terminal and not has_terminal()
        if not (is_end or self.ignores_hangup) or _has_reader(self._reply_file):
            self.replace()
        elif not self.ignores_hangup:
            stop()

    @property
    def _reply_file(self) -> Path:
        return reply_file(Path(self.folder), os.getpid())

    def replace(self) -> None:
        """Starts a new server. Returns at once."""
        if self._thread is None and self.serves_here:
            self._thread = threading.Thread(target=self.run, daemon=True)
            self._thread.start()
        self._wake(b"r")

    def stop(self) -> None:
        """Closes the sockets, and lets all servers end as at SIGTERM. Returns at once."""
        self._wake(b"s")
        if self._thread is None and self.serves_here:
            self._stop()

    def _wake(self, what: bytes) -> None:
        with suppress(OSError):
            self._mouth.send(what)

    def run(self) -> None:
        """Returns when the last server has ended, or when `here_ended` wants to go on itself."""
        while self._goes_on and (self.serves_here or self.children):
            timeout = max(0.0, self.deadline - time.monotonic()) if self._starting else None
            for key, _ in self._selector.select(timeout):
                if key.data is None:
                    self._woken(self._ears.recv(64))
                else:
                    self._heard(key.data)
            if (late := self._starting) and time.monotonic() >= self.deadline:
                late.failure = f"It was not ready after {limits.RESTART_SECONDS} seconds."
                with suppress(ProcessLookupError):
                    os.kill(late.pid, signal.SIGKILL)
                self.deadline = time.monotonic() + 1

    def _woken(self, asked: bytes) -> None:
        if b"c" in asked:
            self._reap()
        if b"s" in asked:
            self._stop()
        if b"r" in asked:
            self._start()

    def _start(self) -> None:
        if self.reply is None:
            self.reply = _opened_reply(self._reply_file)
        if self._starting or self.is_stopping:
            if not self._starting:
                self._answer("failed", "The server is stopping.")
            return
        self._answer("starting")
        self.generation += 1
        own, theirs = socket.socketpair()
        given = {
            "pid": os.getpid(),
            "generation": self.generation,
            "address": self.address,
            "sockets": self.sockets,
            "channel": theirs.fileno(),
        }
        log.info("a new server is started in place of this one")
        try:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                env={**os.environ, VARIABLE: json.dumps(given)},
                pass_fds=(theirs.fileno(), *self.sockets),
                start_new_session=True,  # Ctrl-C in the terminal is for the first process alone
            )
        except OSError as error:
            own.close()
            self._failed(f"It can't be started: {error.strerror}.")
            return
        finally:
            theirs.close()
        self.deadline = time.monotonic() + limits.RESTART_SECONDS
        self._starting = self._watched(Successor(process.pid, own, process))

    def _watched(self, child: Successor) -> Successor:
        self._selector.register(child.channel, EVENT_READ, child)
        return child

    def _heard(self, child: Successor) -> None:
        lines = child.lines()
        for word, message in lines or ():
            if word == "ready" and child is self._starting:
                self._take_over(child)
            elif word == "failed":
                child.failure = message
            elif word == "restart":
                self._start()
        if lines is None:
            self._ended(child)

    def _take_over(self, child: Successor) -> None:
        before, self._serving, self._starting = self._serving, child, None
        log.info("the new server (process %d) takes the requests from now on", child.pid)
        self._answer("done", f"The new server (process {child.pid}) takes the requests.")
        self.serves_here = False
        self._leaving += [before] if before else []
        self.on_replaced(_followed(child))
        for each in self._leaving:  # those that an earlier server asked to leave, too
            with _followed(child) as connection:
                each.say(LEAVE, connection)
        if self.is_stopping:
            child.say_stop()

    def _ended(self, child: Successor) -> None:
        self._selector.unregister(child.channel)
        child.channel.close()
        code = child.code()
        if child is self._starting:
            self._starting = None
            self._failed(child.failure or f"It ended with exit code {code}; see its log.")
        elif child is self._serving:
            self._serving = None
            self.code = self.code or code
        else:
            self._leaving.remove(child)
        if not (self.serves_here or self._serving or self._starting or self.is_stopping):
            log.error("the server has ended, with exit code %d", code)
            self.code = self.code or 1
            self._stop()
            self.on_lost()

    def _failed(self, why: str) -> None:
        log.error("the server is not replaced: %s", why)
        self._answer("failed", why)

    def _answer(self, word: str, message: str = "") -> None:
        if self.reply is None:
            return
        with suppress(OSError):  # no one reads it any more
            os.write(self.reply, json.dumps([word, message]).encode() + b"\n")
        if word != "starting":
            os.close(self.reply)
            self.reply = None

    def _stop(self) -> None:
        self.is_stopping = True
        for descriptor in self.sockets:
            with suppress(OSError):
                os.close(descriptor)
        self.sockets = []
        for child in self.children:
            child.say_stop()

    def kill(self) -> None:
        for child in self.children:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)

    def here_ended(self, then: Callable[[], None] | None = None) -> None:
        """Goes on without this process's own server, if there are others: as a program, or by
        `then`."""
        self.serves_here = self._goes_on = False
        self._wake(b"-")
        if self._thread:
            self._thread.join()
        self._goes_on = True
        if self.children:
            (then or self._execute)()
        self._selector.close()
        self._ears.close()
        self._mouth.close()

    def state(self) -> dict[str, Any]:
        """What `continued` needs, as JSON can hold it."""

        def end(child: Successor | None) -> tuple[int, int] | None:
            return (child.pid, child.channel.fileno()) if child else None

        return {
            **{name: getattr(self, name) for name in KEPT},
            "stopping": self.is_stopping,
            "log": vars(self.log),
            "serving": end(self._serving),
            "starting": end(self._starting),
            "leaving": [end(child) for child in self._leaving],
        }

    def _set_inheritable(self, inheritable: bool) -> None:
        channels = [child.channel.fileno() for child in self.children]
        reply = [] if self.reply is None else [self.reply]
        for descriptor in (*channels, *self.sockets, *reply):
            os.set_inheritable(descriptor, inheritable)

    def _execute(self) -> NoReturn:
        self._set_inheritable(True)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the program handles them
        program = [sys.executable, "-m", __spec__.name, json.dumps(self.state())]
        os.execv(program[0], program)  # noqa: S606

    @classmethod
    def continued(cls, state: dict[str, Any]) -> "Succession":
        kept = {name: state[name] for name in KEPT} | {"is_stopping": state["stopping"]}
        it = cls(**kept, log=LogOptions(**state["log"]), serves_here=False)
        it._serving, it._starting, *leaving = (
            it._watched(Successor(ends[0], socket.socket(fileno=ends[1]))) if ends else None
            for ends in (state["serving"], state["starting"], *state["leaving"])
        )
        it._leaving = [each for each in leaving if each]
        it._set_inheritable(False)
        return it

    def _reap(self) -> None:
        """Waits for children that this process had before it became this program."""
        own = {child.pid for child in self.children}
        with suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in own:
                    break  # its channel tells of it
                os.waitpid(ended.si_pid, 0)

    def run_program(self) -> int:
        """Returns the exit code once all servers have ended."""

        def handle(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGCHLD:
                self._wake(b"c")
                return
            if number == signal.SIGHUP:
                self.hung_up(self.stop)
                return
            if self.is_stopping:
                self.kill()
            self.code = 130 if number == signal.SIGINT else self.code
            self.stop()

        for number in (signal.SIGCHLD, *SIGNALS):
            signal.signal(number, handle)
        self._wake(b"c")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self.run()
        return self.code


def has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def reply_file(folder: Path, pid: int) -> Path:
    return folder / f"restart-{pid}"


def _opened_reply(path: Path) -> int | None:
    """A pipe to the one who has asked for a restart; None if there is none, or it has gone."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    return None


def _has_reader(path: Path) -> bool:
    descriptor = _opened_reply(path)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def ask(folder: Path, pid: int) -> str:
    """Has the server of this first process replaced. Returns a sentence that says by what.

    Raises ServerError if it is not replaced.
    """
    path = reply_file(folder, pid)
    try:
        _make_pipe(path)
        # for writing too, so that it never is at its end
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ServerError(f"The server can't be asked: {error.strerror}.") from error
    try:
        for word, message in _replies(pipe, pid):
            if word == "done":
                return message
            if word == "failed":
                raise ServerError(f"The server was not replaced, and goes on. {message}")
    finally:
        path.unlink(missing_ok=True)
        os.close(pipe)
    raise ServerError("The server ended before it was replaced. See its log.")


def _replies(pipe: int, pid: int) -> Iterator[list[str]]:
    """Ends when the process has."""
    unread, is_heard = b"", False
    while True:
        try:
            os.kill(pid, 0 if is_heard else signal.SIGHUP)
        except ProcessLookupError:
            return
        except PermissionError:
            raise ServerError(f"The server (process {pid}) is another user's.") from None
        readable, _, _ = select.select([pipe], [], [], ASK_SECONDS)
        if readable:
            is_heard = True
            *lines, unread = (unread + os.read(pipe, 1 << 16)).split(b"\n")
            yield from map(json.loads, lines)


def _make_pipe(path: Path) -> None:
    """Raises ServerError if another one waits for a restart of this server."""
    try:
        os.mkfifo(path, 0o600)
    except FileExistsError:
        if _has_reader(path):
            raise ServerError("This server is being restarted already. Wait for it.") from None
        path.unlink(missing_ok=True)  # its process was killed
        os.mkfifo(path, 0o600)


def main() -> None:
    state = json.loads(sys.argv[1])
    succession = Succession.continued(state)
    from mlx_server.system import logs

    if succession.log.file:
        logs.write_to(Path(succession.log.file))
    logs.configure(succession.log.level, succession.log.format)
    sys.exit(succession.run_program())


if __name__ == "__main__":
    main()
