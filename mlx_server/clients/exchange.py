"""An exchange: the one or several requests that make an answer, without any I/O.

It is a generator that yields the bodies to send, receives their answers and returns the last
answer. Being free of I/O, it serves synchronous and asynchronous callers alike. It is a module of
its own since `endpoint` needs OpenAI's package, which the commands do without.
"""

from collections.abc import Awaitable, Callable, Generator
from typing import Any

from mlx_server.errors import GenerationFailed

Wire = dict[str, Any]
Exchange = Generator[Wire, Wire, Wire]


def sent(body: Wire) -> Exchange:
    return (yield body)


def run(exchange: Exchange, send: Callable[[Wire], Wire]) -> Wire:
    try:
        body = next(exchange)
        while True:
            body = exchange.send(send(body))
    except StopIteration as end:
        answer: Wire = end.value
        return answer


async def arun(exchange: Exchange, send: Callable[[Wire], Awaitable[Wire]]) -> Wire:
    try:
        body = next(exchange)
        while True:
            body = exchange.send(await send(body))
    except StopIteration as end:
        answer: Wire = end.value
        return answer


def cut_off() -> GenerationFailed:
    """The error for a stream that ended before its answer."""
    return GenerationFailed("The connection ended before the answer did. See the server's log.")
