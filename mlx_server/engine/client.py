"""The client of one engine process: starts it, sends commands and delivers its reports, those about
the rows of a request by a stream that it reads at its own pace."""

import asyncio
import logging
import secrets
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from copy import copy
from typing import Any

import msgspec

from mlx_server import errors, limits
from mlx_server.engine import messages
from mlx_server.engine.engine_process import SOCKET_BUFFER_BYTES, EngineProcess
from mlx_server.engine.liveness import (
    LOOK_SECONDS,
    EngineActivity,
    Liveness,
    is_stuck_in_step,
    vitals,
)
from mlx_server.engine.messages import (
    Admitted,
    Command,
    Embed,
    Embedded,
    Generate,
    KvCost,
    Prefilled,
    PrefillProgress,
    PromptLogprobs,
    Report,
    RowFailed,
    RowLeftGrammar,
    Token,
)
from mlx_server.engine.worker_arguments import WorkerArguments
from mlx_server.errors import (
    AdapterInvalid,
    EngineDied,
    GenerationFailed,
    ModelUnusable,
    ServerError,
)
from mlx_server.system.turns import turn

Item = Admitted | Prefilled | PrefillProgress | PromptLogprobs | RowLeftGrammar | Token | Embedded

ITEM_BYTES = 128
"""Estimated memory of one token, or of one log probability."""


class RowStream:
    """The reports about one request's rows, until the request ends."""

    def __init__(self, unpause: Callable[["RowStream"], None] = lambda answers: None) -> None:
        """unpause: called when a paused request has taken all its items."""
        self.rows: list[int] = []
        self.unread = 0
        """Estimated bytes of the items not yet taken."""
        self.is_paused = False
        self._unpause = unpause
        self._items: list[Item] = []
        self._error: ServerError | None = None
        self._news = asyncio.Event()

    def put(self, item: Item) -> None:
        self._items.append(item)
        self.unread += _item_bytes(item)
        self._news.set()

    def fail(self, error: ServerError) -> None:
        self._error = error
        self._news.set()

    async def take(self) -> list[Item]:
        """Returns the items that arrived since the last call; waits for at least one."""
        await self._news.wait()
        items, self._items = self._items, []
        self.unread = 0
        if self.is_paused:
            self._unpause(self)
        if not self._error:
            self._news.clear()
        elif not items:
            raise copy(self._error)  # a shared one would collect every request's traceback
        return items


def _error_of(failed: RowFailed) -> ServerError:
    if kind := getattr(errors, failed.error, None):
        error: ServerError = kind(failed.message)
        return error
    return GenerationFailed(f"The answer could not be generated: {failed.message}")


def _item_bytes(item: Item) -> int:
    match item:
        case Token(logprobs=logprobs):
            return ITEM_BYTES * (1 + (1 + len(logprobs.top) if logprobs else 0))
        case PromptLogprobs(logprobs=scored):
            return ITEM_BYTES * sum(1 + len(logprobs.top) for logprobs in scored)
        case Embedded(vectors=vectors):
            return sum(map(len, vectors))
    return ITEM_BYTES


LARGE_BYTES = 64 << 10

LONG_FIELDS = {"prompt", "tokens", "inputs", "pictures"}


def encoded(command: Command) -> msgspec.Raw:
    """Encodes a command. Raises an error if the engine could not read it, which would end it.

    Of a large one it is not tried whether the token ids can be read: that takes four times as long
    as to write them, and whatever is an integer can be.
    """
    payload = messages.encode_command(command)
    tried = payload
    if len(payload) > LARGE_BYTES:
        names = LONG_FIELDS.intersection(command.__struct_fields__)
        short = msgspec.structs.replace(command, **dict.fromkeys(names, ()))
        tried = messages.encode_command(short)
    messages.decode_command(tried)
    return msgspec.Raw(payload)


class Outbox:
    """The commands that the server sends in one turn of its event loop. They arrive together, so
    that the engine takes no step between them."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        """write: called with one frame at the end of a turn in which commands were sent."""
        self._write = write
        self._encoded: list[msgspec.Raw] = []

    def send(self, command: Command) -> None:
        self.send_encoded(encoded(command))

    def send_encoded(self, command: msgspec.Raw) -> None:
        if not self._encoded:
            asyncio.get_running_loop().call_soon(self._write_all)
        self._encoded.append(command)

    def _write_all(self) -> None:
        encoded, self._encoded = self._encoded, []
        self._write(messages.frame(messages.encode_commands(encoded)))


def _read_exception(done: asyncio.Future[Any]) -> None:
    """Avoids a warning about an exception that its caller, who was cancelled, never reads."""
    if not done.cancelled():
        done.exception()


class PendingReplies:
    """Futures of replies, by a key: the names of the command's type, its model and its adapter.

    The replies to one key come in the order of its commands. No two commands share a reply: what
    one of them loaded may be unloaded by the next.
    """

    def __init__(self) -> None:
        self._futures: dict[Hashable, deque[asyncio.Future[Any]]] = {}

    async def next(self, key: Hashable, send: Callable[[], None]) -> Any:
        """Sends a command and waits for its reply, which comes even if the caller is cancelled."""
        send()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_read_exception)
        self._futures.setdefault(key, deque()).append(future)
        return await asyncio.shield(future)

    def settle(self, report: messages.Report) -> None:
        """Gives a report to the command that it replies to, if it replies to one."""
        match report:
            case messages.ModelLoaded(model):
                self._pop("LoadModel", model).set_result(report)
            case messages.CacheMeasured(model, cost):
                self._pop("MeasureCache", model).set_result(cost)
            case messages.AdapterLoaded(model, adapter):
                self._pop("LoadAdapter", model, adapter).set_result(report)
            case messages.Unloaded(model, adapter):
                command = "UnloadAdapter" if adapter else "UnloadModel"
                self._pop(command, model, adapter).set_result(None)
            case messages.CommandFailed(command, model, _, adapter):
                self._pop(command, model, adapter).set_exception(_error_of_command(report))

    def fail_all(self, error: ServerError) -> None:
        for futures in self._futures.values():
            for future in futures:
                future.set_exception(error)
        self._futures.clear()

    def _pop(self, command: str, model: str, adapter: str = "") -> asyncio.Future[Any]:
        key = command, model, adapter
        futures = self._futures[key]
        future = futures.popleft()
        if not futures:
            del self._futures[key]
        return future


def _error_of_command(failed: messages.CommandFailed) -> ServerError:
    if failed.adapter:
        return AdapterInvalid(f"The adapter can't be used: {failed.message}")
    error = ModelUnusable(f"Model {failed.model!r} can't be loaded: {failed.message}")
    error.of_files = failed.of_files
    return error


log = logging.getLogger("mlx_server.engine")

OnLoading = Callable[[int, int], None]

START_SECONDS = 120.0
"""Limit on the start: a cold machine reads MLX from disk, and macOS verifies new libraries first.
Heartbeats begin earlier, so `liveness` notices a process that is stopped during its start."""

DIED = "The engine process died. Send the request again."


class EngineClient:
    """The connection to one engine process. A new process needs a new client."""

    def __init__(
        self,
        arguments: WorkerArguments = WorkerArguments(),  # noqa: B008  it is frozen
        *,
        early: EngineProcess | None = None,
        successor: socket.socket | None = None,
    ) -> None:
        """early: a process that runs already. successor: a connection to a server whose engine is
        used instead."""
        self._arguments, self._process, self._successor = arguments, early, successor
        self._writer: asyncio.StreamWriter | None = None
        self._outbox = Outbox(self._write)
        self._reading: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[messages.Ready] | None = None
        self._on_loading: dict[str, OnLoading] = {}
        self._replies = PendingReplies()
        self.row_streams: dict[int, RowStream] = {}
        """The rows that the engine was given and has not been asked to forget."""
        self._next_row = 0
        self._frames = 0
        self._serves = False
        self._liveness = Liveness()
        self.has_answered = False
        """Whether any row has had a token."""
        self.doing = EngineActivity()
        self._watching: asyncio.Task[None] | None = None
        self._death: ServerError | None = None
        self.lost = asyncio.Event()
        """Set when the process has died or was abandoned."""
        self.on_step: Callable[[messages.StepOutput], None] = lambda step: None
        self.on_ahead: Callable[[messages.ComputedAhead], None] = lambda computed: None
        self.on_prefill: Callable[[messages.PrefillProgress], None] = lambda progress: None
        self.on_device_failed: Callable[[messages.DeviceFailed], None] = lambda failure: None
        self.on_disk_cache: Callable[[messages.DiskCacheUse], None] = lambda use: None

    @property
    def alive(self) -> bool:
        """Whether the process has reported that it is ready and has not died since."""
        return self._serves and self._death is None and not self._is_cut_off

    @property
    def why_lost(self) -> str:
        """A sentence."""
        message = self._death.message if self._death else "The engine did not start."
        return message.removesuffix(" Send the request again.")

    @property
    def _is_cut_off(self) -> bool:
        """Whether the socket is closed. A failed write may show this before `_read_reports` does; a
        further write would be lost, or with uvloop raise RuntimeError."""
        return self._writer is not None and self._writer.is_closing()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> messages.Ready:
        ours = self._successor
        if not ours:
            self._process = self._process or EngineProcess(self._arguments.group)
            ours = await self._process.begin(self._arguments)
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=SOCKET_BUFFER_BYTES)
        self._ready = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(_read_exception)
        self._reading = asyncio.create_task(self._read_reports(reader))
        self._watching = asyncio.create_task(self._watch())
        return await self._is_ready(self._ready)

    async def _is_ready(self, ready: asyncio.Future[messages.Ready]) -> messages.Ready:
        try:
            async with asyncio.timeout(START_SECONDS):
                return await asyncio.shield(ready)
        except TimeoutError:
            self._abandon(f"was not ready after {START_SECONDS:.0f} seconds")
            return await ready  # raises the reason

    def end(self, error: ServerError | None = None) -> None:
        """Lets the process end; pending requests fail with `error`."""
        self._die(error or EngineDied("The engine was stopped."))

    async def stop(self, error: ServerError | None = None) -> None:
        """Ends the process; pending requests fail with `error`."""
        self.end(error)
        if self._watching:
            self._watching.cancel()
        if self._process:
            await self._process.stop()
        if self._reading:
            await self._reading

    async def load(self, command: messages.LoadModel, progress: OnLoading) -> messages.ModelLoaded:
        self._on_loading[command.model] = progress
        try:
            loaded: messages.ModelLoaded = await self._ask(command)
        finally:
            self._on_loading.pop(command.model, None)
        return loaded

    async def unload(self, model: str) -> None:
        """Returns when the engine has freed the model's memory."""
        await self._ask(messages.UnloadModel(model))

    async def kv_cost(self, command: messages.MeasureCache) -> KvCost:
        """Returns the bytes that a row of the model takes by its tokens. The model need not be
        loaded."""
        cost: KvCost = await self._ask(command)
        return cost

    async def load_adapter(self, model: str, adapter: str, path: str) -> messages.AdapterLoaded:
        """adapter: the name that rows use for it; different weights need different names."""
        loaded: messages.AdapterLoaded = await self._ask(messages.LoadAdapter(model, adapter, path))
        return loaded

    async def unload_adapter(self, model: str, adapter: str) -> None:
        await self._ask(messages.UnloadAdapter(model, adapter))

    async def _ask(self, command: messages.Replied) -> Any:
        key = type(command).__name__, command.model, getattr(command, "adapter", "")
        return await self._replies.next(key, lambda: self.send(command))

    def generate(self, rows: Sequence[Generate]) -> AbstractAsyncContextManager[RowStream]:
        """Generates the rows' tokens: see `_running`."""
        return self._running(rows)

    def embed(self, rows: Sequence[Embed]) -> AbstractAsyncContextManager[RowStream]:
        """Computes embeddings: see `_running`."""
        return self._running(rows)

    @asynccontextmanager
    async def _running(self, rows: Sequence[Generate | Embed]) -> AsyncIterator[RowStream]:
        """Runs the rows until the block is left, then cancels those that have not finished.

        Overwrites the rows' numbers with consecutive new ones.
        """
        answers = RowStream(self._unpause)
        for row in rows:
            self._number(row, answers)
        try:
            commands = list[msgspec.Raw]()
            for row in rows:
                await turn()
                commands.append(encoded(row))
            self._check_alive()
            for command in commands:
                self._outbox.send_encoded(command)
            yield answers
        finally:
            self.cancel(answers.rows)
            if answers.is_paused:
                self._unpause(answers)

    def add(self, row: Generate, answers: RowStream) -> None:
        """Adds a row to a running request; it is cancelled with the request's other rows."""
        self._number(row, answers)
        self.send(row)

    def _number(self, row: Generate | Embed, answers: RowStream) -> None:
        if isinstance(row, Generate) and row.own_seed is None:
            row.own_seed = secrets.randbits(64)  # so that another engine can go on with the row
        row.row = self._next_row
        self._next_row += 1
        self.row_streams[row.row] = answers
        answers.rows.append(row.row)

    def cancel(self, rows: Sequence[int]) -> None:
        """Frees the rows at the engine's next step; ignores rows that have finished."""
        unfinished = [row for row in rows if self.row_streams.pop(row, None)]
        if unfinished and self.alive:
            self.send(messages.CancelRows(unfinished))

    def _pause(self, answers: RowStream) -> None:
        answers.is_paused = True
        self.send(messages.PauseRows(answers.rows))

    def _unpause(self, answers: RowStream) -> None:
        answers.is_paused = False
        if self.alive:
            self.send(messages.UnpauseRows(answers.rows))

    def send(self, command: Command) -> None:
        """Sends what is not replied to. The engine ignores rows that have finished."""
        self._check_alive()
        self._outbox.send(command)

    def _check_alive(self) -> None:
        if self._death:
            raise copy(self._death)  # a shared one would collect every request's traceback
        if self._is_cut_off:
            raise EngineDied(DIED)

    def _write(self, frame: bytes) -> None:
        if self._writer is not None and not self._is_cut_off:
            self._writer.write(frame)

    async def _read_reports(self, reader: asyncio.StreamReader) -> None:
        try:
            while not self._death:
                header = await reader.readexactly(messages.HEADER_BYTES)
                frame = await reader.readexactly(messages.length(header))
                self._frames += 1
                for report in messages.decode_reports(frame):
                    if not self._death:
                        self._dispatch(report)
        except (asyncio.IncompleteReadError, ConnectionError):
            if not self._death:
                log.error("the engine process %s died", self.pid or "of the new server")
        except Exception:
            log.exception("the reports of the engine process %s can't be processed", self.pid)
        self._die(EngineDied(DIED))

    async def _watch(self) -> None:
        """Abandons the process when it is silent and dead; `_dispatch` judges its heartbeats."""
        clock = asyncio.get_running_loop().time
        last_frames, before = self._frames, clock()
        while not self._death:
            await asyncio.sleep(LOOK_SECONDS)
            elapsed, before = clock() - before, clock()
            if last_frames != self._frames:
                last_frames = self._frames
                self._liveness.record()
            elif (
                self.pid
                and (status := vitals(self.pid))
                and (why := self._liveness.look(elapsed, status))
            ):
                self._abandon(why)

    def _is_runnable(self) -> bool:
        """Whether the process waits only for a processor or the disk: see `Vitals`."""
        status = vitals(self.pid) if self.pid else None
        return status is not None and status.runnable

    def _abandon(self, what: str, message: str = "") -> None:
        if not self._death:
            log.error("the engine process %s %s and is being killed", self.pid, what)
            message = message or f"The engine process {what}. Send the request again."
            self._die(EngineDied(message))
        self.kill()

    def kill(self) -> None:
        if self._process:
            self._process.kill()

    def _dispatch(self, report: Report) -> None:
        match report:
            case messages.Heartbeat():
                self._liveness.record(report)
                if line := self.doing.report(report.doing, asyncio.get_running_loop().time()):
                    log.info("%s", line)
                if is_stuck_in_step(report, self._is_runnable):
                    self._abandon("is stuck in a step")
            case messages.StepOutput(tokens=tokens):
                self.has_answered = self.has_answered or bool(tokens)
                for token in tokens:
                    self._deliver(token.row, token, last=token.finish is not None)
                self.on_step(report)
            case messages.ComputedAhead():
                self.on_ahead(report)
            case messages.DiskCacheUse():
                self.on_disk_cache(report)
            case messages.DeviceFailed(message=message, ends=ends):
                self.on_device_failed(report)
                if ends:
                    what = "lost its group" if report.kind == "peer" else "lost the GPU"
                    self._abandon(what, f"The engine process was ended: {message}.")
            case messages.RankLost(rank, host, why):
                log.error("rank %d on %s %s", rank, host, why)
                self._abandon(f"lost rank {rank} of its group")
            case messages.PrefillProgress(row):
                self.on_prefill(report)
                self._deliver(row, report, last=False)
            case messages.Admitted(row) | messages.Prefilled(row) | messages.PromptLogprobs(row):
                self._deliver(row, report, last=False)
            case messages.RowLeftGrammar(row) | messages.Embedded(row):
                self._deliver(row, report, last=True)
            case RowFailed(row):
                if answers := self.row_streams.pop(row, None):
                    answers.fail(_error_of(report))
            case messages.ModelLoading(model, done, total):
                if on_loading := self._on_loading.get(model):
                    on_loading(done, total)
            case messages.Ready():
                if self._ready and not self._ready.done():
                    self._serves = True
                    self._ready.set_result(report)
            case _:
                self._replies.settle(report)

    def _deliver(self, row: int, item: Item, *, last: bool) -> None:
        # Reports of rows that were just cancelled may still arrive.
        answers = self.row_streams.pop(row, None) if last else self.row_streams.get(row)
        if answers:
            answers.put(item)
            if answers.unread > limits.UNREAD_BYTES and not answers.is_paused:
                self._pause(answers)

    def _die(self, error: ServerError) -> None:
        self._death = self._death or error
        self.lost.set()
        if self._writer:
            self._writer.close()  # the process exits when its socket is closed
        for answers in self.row_streams.values():
            answers.fail(self._death)
        self.row_streams.clear()
        self._replies.fail_all(self._death)
        if self._ready and not self._ready.done():
            self._ready.set_exception(self._death)
