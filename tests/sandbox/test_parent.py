"""Warm processes: how they live, die and are replaced, shown with those that render templates."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from mlx_server import limits
from mlx_server.errors import TemplatesUnavailable
from mlx_server.request_threads import client_of_request
from mlx_server.system.sandbox import child, parent, template_child
from mlx_server.system.sandbox.chat_template import PROGRAM, ask, packed
from mlx_server.system.sandbox.child import LENGTH_BYTES, Answer, serve
from mlx_server.system.sandbox.parent import Stopped, WarmProcess, WarmProcesses
from mlx_server.system.sandbox.template_messages import RenderTemplate, TemplateReply
from tests.live.server import eventually

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def rendered(own: WarmProcess, source: str, seconds: float, **variables: Any) -> str:
    return ask(own, packed(RenderTemplate(source, variables, seconds, 9)), seconds)[1]


def by_one(processes: WarmProcesses, source: str, **variables: Any) -> str:
    with processes.one() as own:
        return rendered(own, source, 5, **variables)


def pids() -> set[int]:
    found = psutil.Process().children()
    return {each.pid for each in found if template_child.__file__ in each.cmdline()}


@pytest.fixture
def processes() -> Iterator[WarmProcesses]:
    made = WarmProcesses(PROGRAM, most=1, most_idle=1)
    yield made
    made.close()


def at_work(thread: ThreadPoolExecutor) -> tuple[WarmProcess, Future[Any]]:
    """A process that renders without end, and the request for it."""
    own = WarmProcess(PROGRAM)
    rendered(own, "a", 1)
    before = psutil.Process(own._process.pid).cpu_times().user
    asked = thread.submit(rendered, own, ENDLESS, 30)
    eventually(lambda: psutil.Process(own._process.pid).cpu_times().user > before, "it is at work")
    return own, asked


def test_a_client_waits_for_its_own_processes_only() -> None:
    made = WarmProcesses(PROGRAM, most=3, most_idle=0, most_each=1)

    def pid(client: str) -> int:
        client_of_request.set(client)
        with made.one() as own:
            return own._process.pid

    with ThreadPoolExecutor(3) as threads, ExitStack() as held:
        for client in ("a", "b"):
            client_of_request.set(client)
            held.enter_context(made.one())
        again = threads.submit(pid, "a")
        assert threads.submit(pid, "c").result(60)
        assert not again.done()
        client_of_request.set("")
        held.close()
        assert again.result(60)
    made.close()


def test_a_killed_one_is_replaced(processes: WarmProcesses) -> None:
    before = pids()
    assert by_one(processes, "a") == "a"
    (pid,) = pids() - before
    os.kill(pid, signal.SIGKILL)
    (own,) = processes._idle
    eventually(lambda: not own.is_alive, "it is dead")
    assert by_one(processes, "a") == "a"
    assert pids() - before - {pid}


@pytest.mark.slow
def test_one_that_is_stopped_is_given_up(processes: WarmProcesses) -> None:
    own = WarmProcess(PROGRAM)
    rendered(own, "a", 1)
    os.kill(own._process.pid, signal.SIGSTOP)
    with pytest.raises(TemplatesUnavailable, match="the machine is busy"):
        rendered(own, "a", 0.05)
    assert not own.is_alive


@pytest.mark.parametrize(
    ("blow", "share", "error"),
    [
        (signal.SIGALRM, 0.25, TemplatesUnavailable),
        (signal.SIGALRM, 0.0, Stopped),
        (signal.SIGPROF, 0.25, Stopped),
    ],
)
def test_a_request_that_got_no_processor_time_may_be_sent_again(
    blow: signal.Signals, share: float, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends it when its time by the clock is over, or that of the processor."""
    monkeypatch.setattr(parent, "STARVED_SHARE", share)
    with ThreadPoolExecutor(1) as thread:
        own, asked = at_work(thread)
        os.kill(own._process.pid, blow)
        with pytest.raises(error):
            asked.result()


def test_one_that_does_not_start_is_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(parent, "START_SECONDS", 0.1)
    program = tmp_path / "waits.py"
    program.write_text("import signal; signal.pause()")
    own = WarmProcess(replace(PROGRAM, file=str(program)))
    with pytest.raises(TemplatesUnavailable, match="renders chat templates did not start"):
        rendered(own, "a", 2)
    assert not own.is_alive


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_is_killed_at_work_is_not_the_template_s_fault(blow: signal.Signals) -> None:
    with ThreadPoolExecutor(1) as thread:
        own, asked = at_work(thread)
        os.kill(own._process.pid, blow)
        with pytest.raises(TemplatesUnavailable, match="was ended") as reported:
            asked.result()
    assert reported.value.status == 503


@pytest.mark.parametrize("what", ["socketpair", "Process"])
def test_no_free_descriptor_is_not_the_template_s_fault(
    what: str, monkeypatch: pytest.MonkeyPatch, processes: WarmProcesses
) -> None:
    """Neither for a process that is started nor for one whose memory is watched."""

    def refuse(*args: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(parent, "LOOK_SECONDS", 0.001)
    if what == "Process":
        monkeypatch.setattr(psutil, "Process", refuse)
        assert by_one(processes, "a") == "a"
    else:
        monkeypatch.setattr(socket, "socketpair", refuse)
        with pytest.raises(TemplatesUnavailable, match="Too many open files"):
            by_one(processes, "a")


DYING = f"""
import os, signal, sys, threading, time
from mlx_server.system.sandbox.chat_template import PROCESSES, ChatTemplate
ChatTemplate("a").render({{}})
(own,) = PROCESSES._idle
if sys.argv[1] == "busy":
    threading.Thread(target=ChatTemplate({ENDLESS!r}).render, args=({{}},), daemon=True).start()
    time.sleep(0.2)
if sys.argv[1] == "stopped":
    os.kill(own._process.pid, signal.SIGSTOP)
    os.waitpid(own._process.pid, os.WUNTRACED)
print(own._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", ["idle", "busy", "stopped"])
def test_none_outlives_a_server_that_is_killed(state: str) -> None:
    command = [sys.executable, "-c", DYING, state]
    # a session of its own, as an init system gives it
    run = subprocess.run(command, stdout=subprocess.PIPE, start_new_session=True, text=True)
    assert run.returncode == -signal.SIGKILL
    pid = int(run.stdout)
    eventually(lambda: not _is_template_process(pid), f"no process is left that was {state}")


ENDING_SERVER = """
import os, re, signal, sys, threading
from mlx_server.system.sandbox.child import end_with_server
end_with_server(int(sys.argv[2]))
os.kill(os.getppid(), signal.SIGKILL)
re.match("(a|a)*b", "a" * 99) if {holds!r} else threading.Event().wait()
"""
SERVING = """
import sys
from mlx_server.errors import Unavailable
from mlx_server.system.sandbox.parent import Program, WarmProcess
own = WarmProcess(Program(sys.argv[1], "works", 1 << 30, 99, Unavailable))
print(own._process.pid, flush=True)
own.ask(bytearray(b"x"), 99)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "holds",
    [False, pytest.param(True, marks=pytest.mark.skipif(sys.platform != "linux", reason="SIGIO"))],
)
def test_one_that_no_limit_ends_ends_with_its_server(holds: bool, tmp_path: Path) -> None:
    """Also while it lets no other thread run."""
    program = tmp_path / "program.py"
    program.write_text(ENDING_SERVER.format(holds=holds))
    command = [sys.executable, "-c", SERVING, str(program)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert run.returncode == -signal.SIGKILL
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(run.stdout)).wait(10)


def _is_template_process(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return (
            process.status() != psutil.STATUS_ZOMBIE
            and template_child.__file__ in process.cmdline()
        )
    except psutil.NoSuchProcess:
        return False


def test_one_process_serves_all_templates(processes: WarmProcesses) -> None:
    before = pids()
    for number in range(2 * limits.COMPILED_TEMPLATES):
        assert by_one(processes, f"{number}{{{{ x }}}}", x="a") == f"{number}a"
    assert by_one(processes, "0{{ x }}", x="b") == "0b"  # it had forgotten that
    assert len(pids() - before) == 1


ESCAPED = f"""
import sys
sys.path.insert(0, {os.path.dirname(template_child.__file__)!r})
import template_child, os, socket, subprocess
from mlx_server.system.sandbox import child
template_child._warm_up()
child.enter_sandbox(64 << 20)
for crime in (
    lambda: open("/etc/passwd"),
    lambda: socket.socket(),
    lambda: subprocess.Popen(["true"]),
    lambda: bytearray(256 << 20),
):
    try:
        crime()
    except (OSError, MemoryError) as error:
        print(type(error).__name__)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no limit of the address space")
def test_what_gets_out_of_the_sandbox_can_open_nothing() -> None:
    run = subprocess.run(
        [sys.executable, "-I", "-c", ESCAPED], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["OSError", "OSError", "OSError", "MemoryError"]


def test_it_is_told_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVER_API_KEYS", "secret")
    own = WarmProcess(PROGRAM)
    try:
        assert "secret" not in psutil.Process(own._process.pid).environ().values()
        assert rendered(own, "a", 1) == "a"
        assert psutil.Process(own._process.pid).num_fds() == 4  # its lifeline too
    finally:
        own.end()


# The child's end of a warm process: frames, the end of the socket, and the kernel's limits.


HANG = 10.0


class Parent:
    """The server's end of a child that runs in a thread."""

    def __init__(self, answer: Answer) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(HANG)

        def serving() -> None:
            with theirs:
                serve(theirs, answer)

        self.thread = Thread(target=serving, daemon=True)
        self.thread.start()

    def read(self) -> bytes:
        size = int.from_bytes(self._exactly(LENGTH_BYTES))
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self.socket.recv(size - len(found))
            assert part, "the child has ended"
            found += part
        return found

    def close(self) -> None:
        self.socket.close()

    def has_ended(self) -> bool:
        self.thread.join(HANG)
        return not self.thread.is_alive()


Start = Callable[[Answer], Parent]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as started:
        yield lambda answer: started.enter_context(closing(Parent(answer)))


def reverse(frame: bytearray) -> tuple[TemplateReply, bytearray]:
    return TemplateReply(), frame[::-1]


@pytest.mark.parametrize("sent", [b"", b"\0", (9).to_bytes(LENGTH_BYTES), b"\0\0\0\5abc"])
def test_a_server_that_dies_within_a_frame_ends_it(start: Start, sent: bytes) -> None:
    asked: list[bytearray] = []
    parent = start(lambda frame: asked.append(frame) or reverse(frame))  # type: ignore[func-returns-value]
    parent.read()
    parent.socket.sendall(sent)
    parent.socket.close()
    assert parent.has_ended()
    assert asked == []


def run(code: str) -> subprocess.CompletedProcess[str]:
    """As a program that knows nothing but the child's own file."""
    path = f"import sys; sys.path.insert(0, {os.path.dirname(child.__file__)!r})\n"
    command = [sys.executable, "-I", "-c", path + "import child\n" + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("work", "signals"),
    [
        ("while True: pass", (signal.SIGPROF, signal.SIGALRM)),
        ("import time; time.sleep(30)", (signal.SIGALRM,)),
    ],
)
def test_the_kernel_ends_what_takes_too_long(work: str, signals: tuple[signal.Signals]) -> None:
    code = (
        "import time\nchild.enter_sandbox(1 << 30)\nprint('begun', flush=True)\n"
        f"with child.time_limit(0.1):\n    {work}"
    )
    ended = run(code)
    assert -ended.returncode in signals
    assert ended.stdout == "begun\n"


def test_a_limit_ends_with_its_request_also_if_that_fails() -> None:
    code = (
        "import time\nchild.enter_sandbox(1 << 30)\n"
        "for error in (ValueError, MemoryError):\n"
        "    try:\n"
        "        with child.time_limit(0.05):\n            raise error\n"
        "    except error:\n        pass\n"
        "time.sleep(0.4)\nprint('alive')"
    )
    assert run(code).stdout == "alive\n"


def test_the_sandbox_does_not_depend_on_what_the_server_set() -> None:
    """A signal that the server ignores is not ignored by its child, and lower limits stay."""
    code = (
        "import resource, signal\n"
        "numbers = signal.SIGHUP, signal.SIGPROF, signal.SIGALRM\n"
        "for number in numbers:\n    signal.signal(number, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "child._lower(resource.RLIMIT_NOFILE, 100)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "child.enter_sandbox(1 << 30)\n"
        "print({signal.getsignal(number) for number in numbers} == {signal.SIG_DFL})\n"
        "for kind in ('CORE', 'FSIZE', 'NOFILE'):\n"
        "    print(resource.getrlimit(getattr(resource, 'RLIMIT_' + kind)))\n"
    )
    lines = run(code).stdout.splitlines()
    assert lines == ["(64, 64)", "True", "(0, 0)", "(0, 0)", "(3, 3)"]
