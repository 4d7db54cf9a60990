"""Responses over a WebSocket: frames are requests, which are answered one after another."""

import asyncio
import codecs
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from pydantic import ValidationError
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from mlx_server import limits
from mlx_server.api.content import given_files
from mlx_server.api.file_inputs import give_files
from mlx_server.api.responses.answer import BROKEN
from mlx_server.api.responses.create import as_stored, create
from mlx_server.api.responses.items import Wire
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.responses.runs import Run, Runs, log
from mlx_server.errors import BadRequest, ServerError
from mlx_server.http import middleware, strict_json
from mlx_server.http.errors import validation_error
from mlx_server.http.web_sockets import ReceivedMessage
from mlx_server.request_threads import SMALL_BYTES, in_thread, size_of_request
from mlx_server.store import ItemRecord
from mlx_server.system.logs import RequestLogContext, request_context
from mlx_server.system.shared_budget import SharedBudget

SLOW_SECONDS = 30.0
"""How long sending one event may take."""

PIECE_BYTES = 64 << 10

GOING_AWAY, NOT_UTF8, POLICY_VIOLATION, BROKE = 1001, 1007, 1008, 1011

OURS = ("type", "stream", "generate")
"""Fields of a frame that are not fields of a responses body."""


class ClientGone(Exception):
    """The client has disconnected, or does not read."""


class InvalidText(Exception):
    """A text frame is not UTF-8."""


class UnstoredContext:
    """The conversations of the latest responses that are not stored."""

    def __init__(self, budget: SharedBudget) -> None:
        self.contexts: dict[str, Sequence[ItemRecord]] = {}
        """The oldest first."""
        self._sizes: dict[str, int] = {}
        self._budget = budget
        """Shared by all sockets."""

    def keep(self, id: str, context: Sequence[ItemRecord]) -> None:
        """Sets the items of this response. To make room it forgets older ones, or this one."""
        self.forget(id)
        size = sum(len(item.body) for item in context)
        most = limits.SOCKET_MEMORY_BYTES
        if size > most:
            return
        while self.contexts and (
            len(self.contexts) >= limits.SOCKET_RESPONSES or sum(self._sizes.values()) + size > most
        ):
            self.forget(next(iter(self.contexts)))
        if self._budget.take(size):
            self.contexts[id], self._sizes[id] = context, size

    def forget(self, id: str) -> None:
        if self.contexts.pop(id, None) is not None:
            self._budget.give_back(self._sizes.pop(id))

    def clear(self) -> None:
        for id in list(self.contexts):
            self.forget(id)


class Socket:
    def __init__(self, websocket: WebSocket, runs: Runs) -> None:
        self._websocket = websocket
        self._runs = runs
        self._frames: asyncio.Queue[ReceivedMessage] = asyncio.Queue(limits.SOCKET_FRAMES + 1)
        self._unstored = UnstoredContext(runs.socket_memory)
        self._previous: str | None = None
        """The `previous_response_id` that the next request on this connection may name."""

    async def serve(self) -> None:
        """Serves until the client disconnects or the server stops. Raises Overloaded if there are
        too many WebSockets."""
        with self._runs.sockets.one_more(self._websocket.state.source):
            try:
                await self._serve()
            finally:
                self._unstored.clear()

    async def _serve(self) -> None:
        await self._websocket.accept()
        if this := asyncio.current_task():
            self._runs.connect(this)
        answering = asyncio.create_task(self._answer_all())
        reading = asyncio.create_task(self._receive_frames())
        try:
            await asyncio.wait({reading, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, answering):
                task.cancel()
            codes = await asyncio.gather(reading, answering, return_exceptions=True)
        await self._close(next((code for code in codes if isinstance(code, int)), BROKE))

    async def _receive_frames(self) -> int:
        """Receives also during an answer, to notice that the client has disconnected."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return GOING_AWAY
            try:
                self._frames.put_nowait(_received(message))
            except asyncio.QueueFull:
                return POLICY_VIOLATION

    async def _answer_all(self) -> int:
        until = asyncio.get_running_loop().time() + limits.SOCKET_SECONDS
        try:
            while (frame := await self._next(until)) is not None:
                try:
                    await self._answer(frame)
                finally:
                    frame.finish()
        except ClientGone:
            pass
        except InvalidText:
            return NOT_UTF8
        return GOING_AWAY

    async def _next(self, until: float) -> ReceivedMessage | None:
        """The next frame; None when the socket is to be closed."""
        getting = asyncio.create_task(self._frames.get())
        stopping = asyncio.create_task(self._runs.stopping.wait())
        remaining = until - asyncio.get_running_loop().time()
        timeout = min(remaining, limits.SOCKET_IDLE_SECONDS)
        try:
            await asyncio.wait(
                {getting, stopping}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if self._runs.stopping.is_set():
                return None
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
            stopping.cancel()
        if remaining <= timeout:
            await self._refuse(
                BadRequest(
                    "This connection has been open for an hour, the limit. Open a new one.",
                    code="websocket_connection_limit_reached",
                )
            )
        return None

    async def _answer(self, frame: ReceivedMessage) -> None:
        began = time.perf_counter()
        status: int | str = "gone"
        request_context.set(RequestLogContext(self._websocket.state.request_id))
        try:
            status = await self._status(frame)
        finally:
            middleware.note(middleware.SOCKET, self._websocket.scope, status, began)

    async def _status(self, frame: ReceivedMessage) -> int:
        """Answers a frame. Returns the status that the answer would have over HTTP."""
        self._previous = None
        self._websocket.state.body_bytes = len(frame.data)
        size_of_request.set(len(frame.data))
        try:
            await self._respond(*await self._created(frame), frame)
        except ServerError as error:
            self._forget_previous()
            await self._refuse(error)
            return error.status
        except (ClientGone, InvalidText, asyncio.CancelledError):
            raise
        except Exception as error:
            self._forget_previous()
            log.error("a request over a WebSocket ended with an error", exc_info=error)
            await self._refuse(ServerError(BROKEN, code="internal_error"))
            return ServerError.status
        return 200

    def _forget_previous(self) -> None:
        """After an error the client has to send the conversation again, as Open Responses asks: it
        can't tell which of its items the server took."""
        if self._previous is not None:
            self._unstored.forget(self._previous)

    async def _created(self, frame: ReceivedMessage) -> tuple[Run, bool]:
        """The run of a request, and whether it only warms up. The large parsed request is freed
        before the answer is generated, since it is known here alone."""
        request = await _parsed(frame)
        previous = request.get("previous_response_id")
        self._previous = previous if isinstance(previous, str) else None
        given_files.set({})
        await give_files(self._websocket, frame.data)
        body = await in_thread(_body, request)
        created = await create(self._websocket, body, self._unstored.contexts)
        created.run.output.add_ignored(created.ignored)
        if body.store is False:
            self._unstored.keep(created.run.id, created.context)
        return created.run, request.get("generate") is False

    async def _respond(self, run: Run, warms_up: bool, frame: ReceivedMessage) -> None:
        ended = False
        try:
            await (run.store() if warms_up else run.begin())
            frame.release()
            async for chunk in run.prepared() if warms_up else run.chunks():
                failure = run.failure if chunk["type"] == "error" else None
                await self._send(_error_event(failure, chunk) if failure else chunk)
            ended = True
            if run.response["status"] == "failed":
                self._forget_previous()
        finally:
            await run.aclose()
            context = self._unstored.contexts.get(run.id)
            if context is not None and ended:
                self._unstored.keep(run.id, [*context, *as_stored(run.response["output"])])
            else:
                self._unstored.forget(run.id)

    async def _refuse(self, error: ServerError) -> None:
        await self._send(_error_event(error))

    async def _send(self, event: Wire) -> None:
        text = msgspec.json.encode(event).decode()
        try:
            async with asyncio.timeout(SLOW_SECONDS):
                await self._websocket.send_text(text)
        except (TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            raise ClientGone from None

    async def _close(self, code: int) -> None:
        if self._websocket.application_state == WebSocketState.CONNECTED:
            with suppress(TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
                async with asyncio.timeout(1.0):
                    await self._websocket.close(code)


def _error_event(error: ServerError, streamed: Wire | None = None) -> Wire:
    """The event in the form of OpenAI's WebSockets, which have the error within an object.

    streamed: the event that reports it in a stream over HTTP.
    """
    numbered = {"sequence_number": streamed["sequence_number"]} if streamed else {}
    return {"type": "error", "status": error.status, **numbered, **error.body()}


def _received(message: Message) -> ReceivedMessage:
    """The message, as `StrictWebSockets` or as another ASGI server passes it."""
    received = message.get("message")
    if isinstance(received, ReceivedMessage):
        return received
    text = message.get("text")
    data = message["bytes"] if text is None else text.encode()
    return ReceivedMessage(data, is_text=text is not None)


async def _parsed(frame: ReceivedMessage) -> Wire:
    if not frame.is_text:
        raise BadRequest("Frames should be text frames with JSON.")
    if len(frame.data) <= SMALL_BYTES:
        return _parse_json(frame.data)
    return await frame.read(_parse_json)


def _parse_json(data: bytes) -> Wire:
    if not _is_utf8(data):
        raise InvalidText
    return strict_json.parse_request(data)


def _is_utf8(data: bytes) -> bool:
    """Checks in pieces, since the decoded text could take four times the memory."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(data), PIECE_BYTES):
            decoder.decode(data[start : start + PIECE_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _body(request: Wire) -> ResponsesBody:
    kind = request.get("type")
    if kind != "response.create":
        raise BadRequest(
            f"`type` should be `response.create`, not {strict_json.quoted(str(kind))}.",
            param="type",
        )
    if request.get("background"):
        raise BadRequest("`background` is not supported over a WebSocket.", param="background")
    if not isinstance(request.get("generate"), bool | None):
        raise BadRequest("`generate` should be true or false.", param="generate")
    body = {name: value for name, value in request.items() if name not in OURS}
    try:
        return ResponsesBody.model_validate({**body, "stream": True})
    except ValidationError as error:
        raise validation_error(error, body) from None
