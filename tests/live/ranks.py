"""Groups of ranks on loopback, which need no ssh."""

import random
import socket
from contextlib import ExitStack

from mlx_server.engine.worker_arguments import Mode, RankGroup, RankHost

LOOPBACK = RankHost("127.0.0.1", ("127.0.0.1",), is_local=True)


def loopback_group(ranks: int, mode: Mode = "tensor") -> RankGroup:
    return RankGroup(mode, ranks * (LOOPBACK,), port=free_ports(ranks))


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, outside of those that the system gives away."""
    while True:
        first = random.randrange(20000, 32000)
        with ExitStack() as bound:
            try:
                for port in range(first, first + count):
                    bound.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        return first
