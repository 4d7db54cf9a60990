"""The ring's connections: those that TCP has given up are a cut link."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext

import pytest

from mlx_server.worker.ranks.link import IDLE_SECONDS, LOST_SECONDS, Link

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
