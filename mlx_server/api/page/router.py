"""The page's own data, for clients with a key if the server has keys.

With several keys, a client sees only its own requests; times, memory and models are for all.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter, Request, Response

from mlx_server import __version__
from mlx_server.api.handlers import json_response
from mlx_server.api.page.streams import PageStreams
from mlx_server.api.pool import shown
from mlx_server.http.metrics import Metrics
from mlx_server.http.sse import EventStream, Frames
from mlx_server.pool.pool import Pool

SECONDS = 0.5
"""The interval at which a stream looks for changes, as long as its client reads."""

router = APIRouter()


@router.get("/page/events")
async def events(http: Request) -> Response:
    """The present state, and again whenever it has changed. A client that reads slowly misses
    states: none is kept for it."""
    streams: PageStreams = http.app.state.page_streams
    with ExitStack() as on:
        on.enter_context(streams.take(http.state.source))
        states = _States(streams, on.pop_all(), lambda: _now(http))
    return EventStream(states.changes(), {}, source=states, frames=Frames(end=b""))


@router.get("/page/history")
async def history(http: Request) -> Response:
    pool: Pool = http.app.state.pool
    metrics: Metrics = http.app.state.metrics
    body = {
        "object": "page.history",
        "requests": metrics.answers.log.ended(_client(http)),
        "samples": metrics.samples.columns(),
        "budget": pool.memory()["budget"],
    }
    return json_response(body)


class _States:
    """The state of the server, over time. It is to be closed even if it was never read."""

    def __init__(
        self, streams: PageStreams, place: ExitStack, state: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._streams = streams
        self._place = place
        self._state = state

    async def changes(self) -> AsyncGenerator[Mapping[str, Any]]:
        last: Mapping[str, Any] = {}
        going_on = True
        while going_on:
            if (state := self._state()) != last:
                last = state
                yield state
            going_on = await self._streams.pause(SECONDS)

    async def aclose(self) -> None:
        self._place.close()


def _now(http: Request) -> Mapping[str, Any]:
    pool: Pool = http.app.state.pool
    metrics: Metrics = http.app.state.metrics
    log = metrics.answers.log
    return {
        "type": "now",
        "version": __version__,
        "started": http.app.state.started,
        "healthy": pool.healthy,
        "restarts": sum(each.supervisor.restarts for each in pool.engines),
        "rows": pool.row_slots.taken,
        "runtime_models": http.app.state.runtime_models,
        "totals": dict(log.totals),
        **shown(pool),
        "answers": log.running(_client(http)),
    }


def _client(http: Request) -> str | None:
    """The client whose requests are shown; None shows everybody's."""
    return http.state.client if http.state.cache_scope else None
