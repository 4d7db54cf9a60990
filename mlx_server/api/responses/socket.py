"""Responses over one WebSocket, one after another: frames in, events out."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from mlx_server.api import access_log, strict_json
from mlx_server.api.body import LARGE_BYTES
from mlx_server.api.errors import validation_error
from mlx_server.api.responses.create import Created, create
from mlx_server.api.responses.items import Wire
from mlx_server.api.responses.output import BROKEN
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.responses.run import log
from mlx_server.api.responses.runs import Runs
from mlx_server.errors import BadRequest, ServerError
from mlx_server.logs import Asked, asked

MOST_FRAMES = 8
"""That may wait for the response before them."""
SLOW_SECONDS = 30.0
"""How long one event may take to leave."""
LONGEST_SECONDS = 3600.0

GOING_AWAY, POLICY_VIOLATION, BROKE = 1001, 1008, 1011

OURS = ("type", "stream", "stream_options", "generate", "stream_id")
"""What a frame has beside a request's fields, or instead of them."""


class Gone(Exception):
    """The client is, or might as well be."""


class Memory:
    """What was said in responses that are not stored, the latest few of them."""

    MOST = 4
    MOST_BYTES = 16 * 2**20

    def __init__(self) -> None:
        self.said: OrderedDict[str, Sequence[Wire]] = OrderedDict()

    def keep(self, id: str, said: Sequence[Wire]) -> None:
        if sum(len(msgspec.json.encode(item)) for item in said) <= self.MOST_BYTES:
            self.said[id] = said
            if len(self.said) > self.MOST:
                self.said.popitem(last=False)


class Socket:
    def __init__(self, websocket: WebSocket, runs: Runs) -> None:
        self._websocket = websocket
        self._runs = runs
        self._frames: asyncio.Queue[str | bytes] = asyncio.Queue(MOST_FRAMES)
        self._memory = Memory()

    async def serve(self) -> None:
        """Until the client leaves, or the server does."""
        await self._websocket.accept()
        if this := asyncio.current_task():
            self._runs.connect(this)
        answering = asyncio.create_task(self._answer_all())
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait({reading, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, answering):
                task.cancel()
            codes = await asyncio.gather(reading, answering, return_exceptions=True)
        await self._close(next((code for code in codes if isinstance(code, int)), BROKE))

    async def _read(self) -> int:
        """All the time, or nobody would notice that the client has left."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return GOING_AWAY
            text = message.get("text")
            try:
                self._frames.put_nowait(message["bytes"] if text is None else text)
            except asyncio.QueueFull:
                return POLICY_VIOLATION

    async def _answer_all(self) -> int:
        until = asyncio.get_running_loop().time() + LONGEST_SECONDS
        with suppress(Gone):
            while (frame := await self._next(until)) is not None:
                await self._answer(frame)
        return GOING_AWAY

    async def _next(self, until: float) -> str | bytes | None:
        """None when no more is going to be answered."""
        getting = asyncio.create_task(self._frames.get())
        stopping = asyncio.create_task(self._runs.stopping.wait())
        left = until - asyncio.get_running_loop().time()
        try:
            await asyncio.wait(
                {getting, stopping}, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if self._runs.stopping.is_set():
                return None
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
            stopping.cancel()
        await self._refuse(_too_long(), None)
        return None

    async def _answer(self, frame: str | bytes) -> None:
        began = time.perf_counter()
        status: int | str = "gone"
        asked.set(Asked(self._websocket.state.request_id))
        try:
            status = await self._status(frame)
        finally:
            access_log.note(access_log.SOCKET, self._websocket.scope, status, began)

    async def _status(self, frame: str | bytes) -> int:
        """As which its answer would have gone over HTTP."""
        lane: str | None = None
        try:
            request = await _parsed(frame)
            lane = _lane(request)
            await self._respond(request, lane)
        except ServerError as error:
            await self._refuse(error, lane)
            return error.status
        except (Gone, asyncio.CancelledError):
            raise
        except Exception as error:
            log.error("a WebSocket's request broke", exc_info=error)
            await self._refuse(ServerError(BROKEN, code="internal_error"), lane)
            return ServerError.status
        return 200

    async def _respond(self, request: Wire, lane: str | None) -> None:
        body = await asyncio.to_thread(_body, request)
        created = await create(self._websocket, body, self._memory.said)
        run = created.run
        run.output.tell_ignored(created.ignored)
        try:
            if request.get("generate") is False:
                await run.keep()
                chunks = run.prepared()
            else:
                await run.begin()
                chunks = run.chunks()
            async for chunk in chunks:
                await self._send(chunk, lane)
        finally:
            await run.aclose()
        self._remember(body, created)

    def _remember(self, body: ResponsesBody, created: Created) -> None:
        if body.store is False:
            response = created.run.response
            self._memory.keep(response["id"], [*created.said, *response["output"]])

    async def _refuse(self, error: ServerError, lane: str | None) -> None:
        await self._send({"type": "error", "status": error.status, **error.body()}, lane)

    async def _send(self, event: Wire, lane: str | None) -> None:
        marked = {**event, "stream_id": lane} if lane is not None else event
        text = msgspec.json.encode(marked).decode()
        try:
            async with asyncio.timeout(SLOW_SECONDS):
                await self._websocket.send_text(text)
        except (TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            raise Gone from None

    async def _close(self, code: int) -> None:
        if self._websocket.application_state == WebSocketState.CONNECTED:
            with suppress(TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
                async with asyncio.timeout(1.0):
                    await self._websocket.close(code)


async def _parsed(frame: str | bytes) -> Wire:
    if isinstance(frame, bytes):
        raise BadRequest("Frames should be text.")
    raw = frame.encode()
    if len(raw) > LARGE_BYTES:
        return await asyncio.to_thread(strict_json.parse_object, raw)
    return strict_json.parse_object(raw)


def _lane(request: Wire) -> str | None:
    lane = request.get("stream_id")
    if lane is not None and not (isinstance(lane, str) and len(lane) <= 256):
        raise BadRequest("`stream_id` should be a short text.", param="stream_id")
    return lane


def _body(request: Wire) -> ResponsesBody:
    kind = request.get("type")
    if kind != "response.create":
        raise BadRequest(
            f"`type` should be `response.create`, not {strict_json.quoted(str(kind))}.",
            param="type",
        )
    if request.get("background"):
        raise BadRequest("`background` can't be had over a WebSocket.", param="background")
    if not isinstance(request.get("generate"), bool | None):
        raise BadRequest("`generate` should be true or false.", param="generate")
    asked = {name: value for name, value in request.items() if name not in OURS}
    try:
        return ResponsesBody.model_validate({**asked, "stream": True})
    except ValidationError as error:
        raise validation_error(error, asked) from None


def _too_long() -> ServerError:
    return BadRequest(
        "This connection has been open for an hour, which is the most. Open another.",
        code="websocket_connection_limit_reached",
    )
