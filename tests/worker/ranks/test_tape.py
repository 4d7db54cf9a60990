"""What rank 0 reads, the other ranks read too; connections that TCP has given up are a cut link."""

import queue
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from threading import Event
from typing import Any

import pytest

from mlx_server.engine.messages import StepOutput, Token
from mlx_server.worker.ranks.link import (
    CHECK_STEPS,
    IDLE_SECONDS,
    LOST_SECONDS,
    Diverged,
    Link,
    RecordedInputs,
    RepeatedInputs,
    TokenDigest,
    decode_input,
)
from mlx_server.worker.server_connection import Inbox, OwnInputs


def a_step(id: int, tokens: int = 2) -> StepOutput:
    return StepOutput("m", [Token(row, id + row) for row in range(tokens)], 0, 0, 0)


def a_pair() -> tuple[Inbox, RecordedInputs, RepeatedInputs]:
    inbox: Inbox = queue.SimpleQueue()
    recorded: queue.SimpleQueue[Any] = queue.SimpleQueue()
    first = RecordedInputs(OwnInputs(inbox), lambda each: recorded.put(decode_input(each)))
    return inbox, first, RepeatedInputs(recorded)


def test_a_task_has_ended_on_a_rank_when_it_has_on_rank_0() -> None:
    _, first, second = a_pair()
    early: Future[int] = Future()
    may_end, late = Event(), ThreadPoolExecutor(1)
    assert not first.is_done(early)
    early.set_result(1)
    assert first.is_done(early)
    task = late.submit(may_end.wait)
    assert not second.is_done(early), "rank 0 looked before it had ended"
    asked = ThreadPoolExecutor(1).submit(second.is_done, task)
    assert not asked.done()
    may_end.set()
    assert asked.result(10)
    assert task.done()


def test_digests_differ_where_a_token_does() -> None:
    steps = [a_step(i) for i in range(CHECK_STEPS)]
    same, other, longer = TokenDigest(), TokenDigest(), TokenDigest()
    due = [same.add([step]) for step in steps]
    assert due == [False] * (CHECK_STEPS - 1) + [True]
    steps[3].tokens[0].id += 1
    for step in steps:
        other.add([step])
        longer.add([a_step(0, tokens=0), step])
    assert same.value != other.value == longer.value
    assert longer.steps == same.steps, "a step without tokens is none"


def test_a_rank_ends_that_has_computed_other_tokens() -> None:
    _, first, second = a_pair()
    for i in range(2 * CHECK_STEPS - 1):
        first.compare([a_step(i)])
        second.compare(a_step(i))
    first.compare([a_step(1)])
    with pytest.raises(Diverged, match=r"^has computed other tokens"):
        second.compare(a_step(2))


linux = pytest.mark.skipif(sys.platform != "linux", reason="the options have other names")

PEER = """
import socket, struct, sys
with socket.create_connection(("127.0.0.1", {port})) as peer:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", {reset}, 0))
    sys.stdin.read()
"""


@contextmanager
def connected(*, reset: bool) -> Iterator[socket.socket]:
    """A connection that its other side, which ends with the block, resets or closes then."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = PEER.format(port=server.getsockname()[1], reset=int(reset))
        peer = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE)
        accepted = server.accept()[0]
    with accepted:
        yield accepted
        peer.communicate()
        with pytest.raises(ConnectionResetError) if reset else nullcontext():
            assert not accepted.recv(1)


@pytest.fixture
def made() -> Iterator[Callable[[], Link]]:
    with ExitStack() as links:
        yield lambda: links.enter_context(closing(Link()))


@linux
def test_every_connection_is_probed(made: Callable[[], Link]) -> None:
    with connected(reset=False) as connection:
        assert not made().is_cut
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == IDLE_SECONDS
        limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert limit == 1000 * LOST_SECONDS


def test_a_connection_that_was_lost_is_a_cut_link(made: Callable[[], Link]) -> None:
    with connected(reset=True):
        link = made()
        assert not link.is_cut
    assert link.is_cut
