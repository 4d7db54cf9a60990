"""Runs batches: each line of a file is answered as its endpoint answers a request, exactly once.

The answers are appended to files, which are the journal too: a server that takes over a batch whose
server has ended answers the lines that have no answer there. A batch is locked while it runs.
"""

import asyncio
import io
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.types import Message

from mlx_server import limits
from mlx_server.api.chat_completions.routes import chat_completions
from mlx_server.api.completions import completions
from mlx_server.api.embeddings import embeddings
from mlx_server.api.file_inputs import numbered_lines
from mlx_server.api.files import new_file
from mlx_server.api.messages.routes import create_message
from mlx_server.api.responses.routes import PATH as RESPONSES_PATH
from mlx_server.api.responses.routes import create_response
from mlx_server.errors import (
    BadRequest,
    NotFound,
    Overloaded,
    ServerError,
    ShuttingDown,
    StoreFull,
    StoreUnavailable,
    Unavailable,
)
from mlx_server.http.errors import MESSAGES_PATH, error_response
from mlx_server.pool.scheduler import cancelled
from mlx_server.request_threads import client_of_request
from mlx_server.store import BatchKind, Record, Store
from mlx_server.system.logs import RequestLogContext, request_context

log = logging.getLogger("mlx_server.api")

ENDPOINTS: dict[str, Callable[[Request], Any]] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/embeddings": embeddings,
    RESPONSES_PATH: create_response,
    MESSAGES_PATH: create_message,
}

BATCH_KINDS: tuple[BatchKind, ...] = ("batch", "message batch")

LOOK_SECONDS = 1.0
"""How often a batch stores its counts, and sees whether it was cancelled."""
RETRY_SECONDS = 5.0
"""Pause after an error of the disk or the store, until which a batch waits."""
BUSY_SECONDS = 0.5
ATTEMPTS = 5
"""How often a line is sent while the model is unavailable. One that finds the queue full waits."""
WINDOW_SECONDS = 86400
READ_BYTES = 1 << 20

Status = Literal[
    "validating", "in_progress", "cancelling", "completed", "failed", "expired", "cancelled"
]
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


class BatchJob(msgspec.Struct, kw_only=True):
    """A batch of either API, as it is stored."""

    id: str
    kind: BatchKind
    endpoint: str
    created_at: int
    expires_at: int
    results_id: str
    """The name of the content with the answers; that of OpenAI's output file."""
    errors_id: str | None = None
    """The same for answers that are errors, if they have a file of their own."""
    status: Status = "validating"
    input_file_id: str | None = None
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    """After which the output files expire."""
    in_progress_at: int | None = None
    cancelling_at: int | None = None
    ended_at: int | None = None
    total: int = 0
    counts: dict[str, int] = {}
    """Answers by their outcome, and their tokens."""
    errors: list[dict[str, Any]] = []
    """Why it has failed."""
    files: list[str] = []
    """The ids of the output files that are not empty."""

    @property
    def input_name(self) -> str:
        return f"{self.id}.input"

    @property
    def names(self) -> list[str]:
        """The names of the files with answers."""
        return [self.results_id, *([self.errors_id] if self.errors_id else [])]

    @property
    def contents(self) -> list[str]:
        """The names of what only the batch has: OpenAI's files have records of their own."""
        if self.status not in ENDED:
            return [self.input_name, *self.names]
        return [] if self.errors_id else [self.results_id]

    def record(self) -> Record:
        status = "completed" if self.status in ENDED else "in_progress"
        labels = msgspec.json.encode({"contents": self.contents}).decode()
        body = msgspec.json.encode(self)
        return Record(self.kind, self.id, self.created_at, body, status, labels=labels)


def batch_of(body: bytes) -> BatchJob:
    return msgspec.json.decode(body, type=BatchJob)


class BatchLine(msgspec.Struct):
    """A request of either API's batch."""

    custom_id: str
    method: str = "POST"
    url: str | None = None
    body: msgspec.Raw = msgspec.Raw(b"")
    params: msgspec.Raw = msgspec.Raw(b"")

    @property
    def request(self) -> bytes:
        return bytes(self.body) or bytes(self.params)


class LineOptions(msgspec.Struct):
    """The fields of a request that a batch decides."""

    stream: Any = None
    background: Any = None
    store: Any = msgspec.UNSET


class LineResult(msgspec.Struct):
    type: str = ""


class ReplyBody(msgspec.Struct):
    usage: dict[str, Any] | None = None


class AnswerResponse(msgspec.Struct):
    body: ReplyBody = msgspec.field(default_factory=ReplyBody)


class Answered(msgspec.Struct):
    custom_id: str
    result: LineResult = msgspec.field(default_factory=LineResult)
    response: AnswerResponse | None = None

    @property
    def usage(self) -> dict[str, int]:
        usage = self.response.body.usage if self.response else None
        return _counted(usage) if usage else {}


def _counted(usage: Mapping[str, Any]) -> dict[str, int]:
    """The counts of a usage in the words of chat completions or of responses."""
    counts = {}
    for part, word, detail in (
        ("input", "prompt", "cached"),
        ("output", "completion", "reasoning"),
    ):
        details = usage.get(f"{word}_tokens_details") or usage.get(f"{part}_tokens_details") or {}
        counts[f"{part}_tokens"] = usage.get(f"{word}_tokens") or usage.get(f"{part}_tokens") or 0
        counts[f"{detail}_tokens"] = details.get(f"{detail}_tokens", 0)
    return counts


def line_of(raw: bytes) -> BatchLine:
    return msgspec.json.decode(raw, type=BatchLine)


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    return (raw for _, raw in numbered_lines(file))


def wrong_lines(file: BinaryIO, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """The number of lines, and what is wrong with them."""
    errors: list[dict[str, Any]] = []
    ids: set[str] = set()
    count = 0
    for count, (number, raw) in enumerate(numbered_lines(file), 1):
        problem = _problem(raw, endpoint, ids)
        if count > (most := limits.BATCH_LINES):
            problem = ("too_many_requests", f"A batch may have {most} requests.", None)
        if problem:
            code, message, param = problem
            errors.append({"code": code, "message": message, "param": param, "line": number})
        if count > most or len(errors) == limits.BATCH_ERRORS:
            break
    if not count:
        said = "The input file has no requests."
        errors.append({"code": "empty_file", "message": said, "param": None, "line": None})
    return count, errors


def _problem(raw: bytes, endpoint: str, ids: set[str]) -> tuple[str, str, str | None] | None:
    if len(raw) > (most := limits.BATCH_LINE_BYTES):
        return "line_too_large", f"The line is longer than {most} bytes.", None
    try:
        line = line_of(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        wrong = isinstance(error, msgspec.ValidationError)
        code = "missing_required_parameter" if wrong else "invalid_json_line"
        return code, f"The line is not a JSON object of a request: {error}.", None
    most = limits.CUSTOM_ID_CHARACTERS
    if not 0 < len(line.custom_id) <= most:
        return "invalid_custom_id", f"`custom_id` should have 1 to {most} characters.", "custom_id"
    if line.custom_id in ids:
        return "duplicate_custom_id", "Another line has the same `custom_id`.", "custom_id"
    ids.add(line.custom_id)
    if line.method != "POST":
        return "invalid_method", "`method` should be POST.", "method"
    if line.url != endpoint:
        return "invalid_url", f"`url` should be the batch's endpoint, {endpoint}.", "url"
    if not line.request.lstrip().startswith(b"{"):
        return "missing_required_parameter", "`body` should be an object.", "body"
    return None


@dataclass
class Journal:
    """The files with answers, whose lines are the state of a batch. They are locked."""

    results: BinaryIO
    errors: BinaryIO
    """The same file if errors have no other."""
    answered: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0

    def recover(self) -> None:
        """Reads what is answered, and cuts off a line that was being written."""
        for file, outcome in ((self.results, "completed"), (self.errors, "failed")):
            if outcome == "failed" and self.errors is self.results:
                break
            end = 0
            file.seek(0)
            reader = io.BufferedReader(file, READ_BYTES)  # type: ignore[type-var]
            for raw in reader:
                try:
                    line = msgspec.json.decode(raw, type=Answered)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    break
                if not raw.endswith(b"\n"):
                    break
                end += len(raw)
                self.answered.add(line.custom_id)
                self.counts.update({line.result.type or outcome: 1, **line.usage})
            reader.detach()
            file.truncate(end)
            file.seek(end)
            self.nbytes += end

    def add(self, custom_id: str, outcome: str, line: bytes) -> None:
        assert custom_id not in self.answered
        file = self.errors if outcome == "failed" else self.results
        start, rest = file.tell(), memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(start)
            file.seek(start)
            raise
        self.nbytes += len(line) + 1
        self.answered.add(custom_id)
        self.counts.update({outcome: 1, **msgspec.json.decode(line, type=Answered).usage})

    def sync(self) -> None:
        for file in {self.results, self.errors}:
            os.fsync(file.fileno())


REASONS: Mapping[str, tuple[Status, str, str, str]] = {
    "cancelled": ("cancelled", "canceled", "batch_cancelled", "The batch was cancelled before."),
    "expired": (
        *("expired", "expired", "batch_expired"),
        "This request could not be executed before the completion window expired.",
    ),
    "full": (
        *("completed", "errored", "batch_too_large"),
        "The answers of this batch are at the limit on a file.",
    ),
}
"""Why the rest is not answered: the status of the batch, the outcome, the code and the message."""


def unanswered(batch: BatchJob, custom_id: str, reason: str) -> tuple[str, bytes]:
    """The outcome and the line of a request that is not answered."""
    _, outcome, code, message = REASONS[reason]
    if batch.kind == "batch":
        error = {"code": code, "message": message}
        return "failed", _line(custom_id, None, error)
    result: dict[str, Any] = {"type": outcome}
    if outcome == "errored":
        inner = {"type": "api_error", "message": message}
        result["error"] = {"type": "error", "error": inner, "request_id": None}
    return outcome, msgspec.json.encode({"custom_id": custom_id, "result": result})


def _line(custom_id: str, response: Mapping[str, Any] | None, error: Any = None) -> bytes:
    id = f"batch_req_{uuid.uuid4().hex}"
    line = {"id": id, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line)


def answer_line(batch: BatchJob, custom_id: str, reply: "Reply") -> tuple[str, bytes]:
    is_ok = reply.status < 400
    body = msgspec.Raw(reply.body)
    if batch.kind == "batch":
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
        return "completed" if is_ok else "failed", _line(custom_id, response)
    result = {"type": "succeeded", "message": body} if is_ok else {"type": "errored", "error": body}
    line = msgspec.json.encode({"custom_id": custom_id, "result": result})
    return str(result["type"]), line


@dataclass
class Reply:
    request_id: str
    status: int = 0
    body: bytes = b""
    error: ServerError | None = None


class BatchRunner:
    def __init__(
        self,
        app: FastAPI,
        store: Store,
        clients: Mapping[str, Mapping[str, Any]],
        places: int,
    ) -> None:
        """clients: the state of a request of each owner whose key this server knows.
        places: the lines of all batches that are answered at once."""
        self._app = app
        self._store = store
        self._clients = clients
        self._places = asyncio.Semaphore(places)
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._coming: list[str] = []
        """The owners of batches that are being stored."""

    @contextmanager
    def room(self, owner: str) -> Iterator[None]:
        """Has room for a batch that is started in it. Raises Overloaded if there are too many."""
        owners = [*self._coming, *(each for each, _ in self._running.values())]
        if len(owners) >= (most := limits.BATCHES) or owners.count(owner) >= most // 2:
            raise Overloaded("Too many batches are under way. Try again when one has ended.")
        self._coming.append(owner)
        try:
            yield
        finally:
            self._coming.remove(owner)

    async def adopt(self) -> None:
        """Goes on with the batches of servers that have ended."""
        with suppress(StoreUnavailable):  # the store has logged it
            for kind, id, owner in await self._store.claim(self._clients.keys(), BATCH_KINDS):
                log.info("batch %s goes on here: its server has ended", id)
                self.start(kind, id, owner)

    def start(self, kind: BatchKind, id: str, owner: str) -> None:
        task = asyncio.create_task(self._run(kind, id, owner))
        self._running[id] = owner, task
        task.add_done_callback(lambda _: self._running.pop(id, None))

    async def stop(self) -> None:
        """Leaves the batches to other servers, or to the next one."""
        await cancelled([task for _, task in self._running.values()])

    async def _run(self, kind: BatchKind, id: str, owner: str) -> None:
        while True:
            try:
                await self._go_on(kind, id, owner)
                return
            except NotFound:  # deleted
                return
            except (OSError, StoreUnavailable, StoreFull) as error:
                log.warning("batch %s waits: %s", id, error)
            except Exception as error:
                log.error("batch %s ended with an error", id, exc_info=error)
                problem = {"code": "internal_error", "message": "See the server's log."}
                with suppress(ServerError):
                    await self._fail(kind, id, owner, [problem])
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _edit(
        self,
        kind: BatchKind,
        id: str,
        owner: str,
        change: Callable[[BatchJob], None],
        *files: Record,
    ) -> BatchJob:
        def changed(record: Record) -> Record:
            batch = batch_of(record.body)
            change(batch)
            return batch.record()

        return batch_of((await self._store.edit(kind, id, owner, changed, files)).body)

    async def _fail(
        self, kind: BatchKind, id: str, owner: str, errors: list[dict[str, Any]]
    ) -> None:
        def fail(batch: BatchJob) -> None:
            batch.status, batch.ended_at, batch.errors = "failed", int(time.time()), errors

        batch = await self._edit(kind, id, owner, fail)
        await asyncio.to_thread(self._store.contents.remove, [batch.input_name, *batch.names])

    async def _go_on(self, kind: BatchKind, id: str, owner: str) -> None:
        contents = self._store.contents
        batch = await self._edit(kind, id, owner, lambda _: None)
        if batch.status in ENDED:
            return
        with ExitStack() as opened:
            files = [opened.enter_context(contents.resume(name)) for name in batch.names]
            input = opened.enter_context(contents.open(batch.input_name))
            journal = Journal(files[0], files[-1])
            await asyncio.to_thread(journal.recover)
            if batch.status == "validating":
                if kind == "batch":
                    total, errors = await asyncio.to_thread(wrong_lines, input, batch.endpoint)
                    if errors:
                        await self._fail(kind, id, owner, errors)
                        return
                else:
                    total = batch.total

                def begin(batch: BatchJob) -> None:
                    batch.total, batch.in_progress_at = total, int(time.time())
                    if batch.status == "validating":
                        batch.status = "in_progress"

                batch = await self._edit(kind, id, owner, begin)
            reason = await self._answer(batch, owner, journal)
            if reason:
                with contents.open(batch.input_name) as rest:
                    await asyncio.to_thread(_close, batch, reason, rest, journal)
            await asyncio.to_thread(journal.sync)
            await self._finish(batch, owner, journal, reason)

    async def _answer(self, batch: BatchJob, owner: str, journal: Journal) -> str | None:
        """Answers the lines. Returns why the rest is not answered, if there is a rest."""
        work = asyncio.create_task(self._answer_all(batch, owner, journal))

        def count(batch: BatchJob) -> None:
            batch.counts = dict(journal.counts)

        reason = None
        try:
            while not reason:
                if batch.status == "cancelling":
                    reason = "cancelled"
                elif time.time() >= batch.expires_at:
                    reason = "expired"
                elif journal.nbytes > limits.FILE_BYTES:
                    reason = "full"
                else:
                    await asyncio.wait({work}, timeout=LOOK_SECONDS)
                    if work.done():
                        work.result()
                        return None
                    batch = await self._edit(batch.kind, batch.id, owner, count)
            return reason
        finally:
            await cancelled([work])

    async def _answer_all(self, batch: BatchJob, owner: str, journal: Journal) -> None:
        tasks: set[asyncio.Task[None]] = set()
        try:
            async for raw in _read(self._store.contents.open(batch.input_name)):
                line = line_of(raw)
                if line.custom_id in journal.answered:
                    continue
                await self._places.acquire()
                task = asyncio.create_task(self._answer_line(batch, owner, line, journal))
                tasks.add(task)
                task.add_done_callback(lambda _: self._places.release())
                tasks -= _ended(tasks)
            while tasks:
                await asyncio.wait(tasks)
                tasks -= _ended(tasks)
        finally:
            await cancelled(tasks)

    async def _answer_line(
        self, batch: BatchJob, owner: str, line: BatchLine, journal: Journal
    ) -> None:
        for attempt in range(ATTEMPTS):
            reply = await self._reply(batch.endpoint, owner, line.request)
            while isinstance(reply.error, Overloaded):
                await asyncio.sleep(BUSY_SECONDS)
                reply = await self._reply(batch.endpoint, owner, line.request)
            if not isinstance(reply.error, Unavailable):
                break
            await asyncio.sleep(BUSY_SECONDS * 2**attempt)
        journal.add(line.custom_id, *answer_line(batch, line.custom_id, reply))

    async def _reply(self, path: str, owner: str, body: bytes) -> Reply:
        """What the endpoint answers to a request with this body."""
        reply = Reply(f"req_{uuid.uuid4().hex}")
        request_context.set(RequestLogContext(reply.request_id))
        client_of_request.set(self._clients[owner]["source"])
        sent: list[bytes] = []

        async def receive() -> Message:
            while sent:
                return {"type": "http.request", "body": sent.pop()}
            await asyncio.Event().wait()  # the client never leaves
            raise AssertionError

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
            else:
                reply.body += message.get("body", b"")

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [],
            "app": self._app,
            "state": {**self._clients[owner], "request_id": reply.request_id},
        }
        try:
            sent.append(_as_sent(path, body))
            response: Response = await ENDPOINTS[path](Request(scope, receive))
            await response(scope, receive, send)
        except ShuttingDown:
            await asyncio.Event().wait()  # until this is cancelled: the line is another server's
        except ServerError as error:
            reply.error = error
        except Exception as error:
            log.error("a line of a batch ended with an error", exc_info=error)
            reply.error = ServerError("Internal server error. See the server's log.")
        if reply.error:
            reply.body = b""
            await error_response(reply.error, scope)(scope, receive, send)
        return reply

    async def _finish(
        self, batch: BatchJob, owner: str, journal: Journal, reason: str | None
    ) -> None:
        """Ends the batch, and makes its answers files of the client, all at once."""
        status: Status = REASONS[reason][0] if reason else "completed"
        files = []
        if batch.errors_id:
            kinds = ("output", "error")
            opened = (journal.results, journal.errors)
            for name, kind, file in zip(batch.names, kinds, opened, strict=True):
                if size := os.fstat(file.fileno()).st_size:
                    shown = f"{batch.id}_{kind}.jsonl"
                    seconds = batch.output_seconds
                    files.append(
                        new_file(self._store, name, "batch_output", shown, size, seconds=seconds)
                    )

        def end(batch: BatchJob) -> None:
            batch.status, batch.ended_at = status, int(time.time())
            batch.counts, batch.files = dict(journal.counts), [file.id for file in files]

        batch = await self._edit(batch.kind, batch.id, owner, end, *files)
        kept = {*batch.files, *batch.contents}
        left = [name for name in (batch.input_name, *batch.names) if name not in kept]
        await asyncio.to_thread(self._store.contents.remove, left)


def _as_sent(path: str, body: bytes) -> bytes:
    """The request as a batch sends it: a response is stored only if the line asks for that."""
    with suppress(msgspec.DecodeError):
        options = msgspec.json.decode(body, type=LineOptions)
        for name in ("stream", "background"):
            if getattr(options, name):
                raise BadRequest(f"`{name}` has no place in a batch: leave it out.", param=name)
        if path == RESPONSES_PATH and options.store is None:
            given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            return msgspec.json.encode({**given, "store": False})
        if path == RESPONSES_PATH and options.store is msgspec.UNSET and body.strip(b" {}"):
            return b'{"store":false,' + body.lstrip()[1:]
    return body


async def _read(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        lines = lines_of(file)
        while some := await asyncio.to_thread(_some, lines):
            for raw in some:
                yield raw


def _some(lines: Iterator[bytes]) -> list[bytes]:
    """The next lines, about READ_BYTES of them."""
    some, size = [], 0
    for raw in lines:
        some.append(raw)
        size += len(raw)
        if size >= READ_BYTES:
            break
    return some


def _ended(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Those of the tasks that have ended. Raises their errors."""
    ended = {task for task in tasks if task.done()}
    for task in ended:
        task.result()
    return ended


def _close(batch: BatchJob, reason: str, input: BinaryIO, journal: Journal) -> None:
    """Writes a line for each request that is not answered."""
    for raw in lines_of(input):
        custom_id = line_of(raw).custom_id
        if custom_id not in journal.answered:
            journal.add(custom_id, *unanswered(batch, custom_id, reason))
