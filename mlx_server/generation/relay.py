"""Computes the rows of the server that was here before a restart: see `RowRelay`."""

import asyncio
import json
import socket
from collections.abc import Coroutine
from functools import partial
from pathlib import Path

from mlx_server.engine import messages
from mlx_server.engine.messages import Embed, Generate, PromptLogprobs, Report, Token
from mlx_server.errors import AdapterInvalid, ModelReplaced, ServerError, message_of
from mlx_server.generation.embeddings import compute
from mlx_server.pool.adapters import LeasedAdapter, catalog_of
from mlx_server.pool.lease import MemoryDemand
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import PreparedModel
from mlx_server.pool.readmission import Attempts, fingerprint
from mlx_server.request_threads import in_thread

Asked = messages.LoadModel | messages.MeasureCache | messages.LoadAdapter


class RowRelay:
    """To the server before this one it is an engine: commands come over a socket, and reports go
    back. Models and rows take no memory there; what they take here is leased as for any request.
    """

    def __init__(self, pool: Pool, before: socket.socket) -> None:
        self._pool = pool
        self._before = before
        self._writer: asyncio.StreamWriter
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """By the number of the row, or of the command that is replied to."""
        self._paused: set[int] = set()
        self._unpaused = asyncio.Event()
        self._adapters: dict[tuple[str, str | None], LeasedAdapter] = {}

    async def serve(self) -> None:
        """Returns when that server has ended, or keeps its rows."""
        reader, self._writer = await asyncio.open_connection(sock=self._before)
        self._writer.write(json.dumps(self._pool.described()).encode() + b"\n")
        if ready := self._pool.supervisor.ready:
            self._send(ready)
        try:
            while True:
                header = await reader.readexactly(messages.HEADER_BYTES)
                frame = await reader.readexactly(messages.length(header))
                for command in messages.decode_commands(frame):
                    self._take(command)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            for task in self._tasks.values():
                task.cancel()
            self._writer.close()

    def _send(self, report: Report) -> None:
        self._writer.write(messages.frame(messages.encode_reports([report])))

    def _take(self, command: messages.Command) -> None:
        match command:
            case Generate(row) | Embed(row):
                self._begin(row, self._answer(command))
            case messages.CancelRows(rows):
                for row in rows:
                    if task := self._tasks.get(row):
                        task.cancel()
            case messages.PauseRows(rows):
                self._paused.update(rows)
            case messages.UnpauseRows(rows):
                self._paused.difference_update(rows)
                self._unpaused.set()
                self._unpaused = asyncio.Event()
            case messages.LoadModel() | messages.MeasureCache() | messages.LoadAdapter():
                self._begin(-id(command), self._answer(command))
            case messages.UnloadModel(model):
                self._send(messages.Unloaded(model))
            case messages.UnloadAdapter(model, adapter):
                self._send(messages.Unloaded(model, adapter))

    def _begin(self, key: int, work: Coroutine[None, None, None]) -> None:
        task = self._tasks[key] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _answer(self, command: Generate | Embed | Asked) -> None:
        number = command.row if isinstance(command, Generate | Embed) else 0
        try:
            prepared = await self._pool.prepared(command.model)
            match command:
                case Generate(client=client):
                    with self._pool.row_slots.hold(1, client):
                        await self._generate(prepared, command)
                case Embed():
                    inputs, pairs = command.inputs, command.second_from
                    vectors = await compute(self._pool, prepared, command, inputs, pairs)
                    self._send(messages.Embedded(number, [*vectors]))
                case _:
                    self._send(await self._reply(prepared, command))
        except Exception as error:
            self._send(_failure(command, number, error))

    async def _reply(self, prepared: PreparedModel, command: Asked) -> Report:
        match command:
            case messages.LoadAdapter(model, digest, path):
                find = catalog_of(prepared).find_folder
                spec, _ = await in_thread(find, Path(path), model=model)
                if spec.digest != digest:
                    raise AdapterInvalid(f"The files of adapter {spec.name!r} have changed.")
                self._adapters[model, digest] = LeasedAdapter(spec)
                return messages.AdapterLoaded(model, digest, 0)
            case messages.MeasureCache(model):
                return messages.CacheMeasured(model, prepared.kv)
        if str(prepared.path) != command.path:
            raise ModelReplaced(f"The files of {command.model} were replaced.")
        attempts = Attempts(prepared.id, lambda: "")
        while not attempts.is_done:
            demand = MemoryDemand(prepared.kv, 1, 1)
            async with self._pool.visit(attempts, prepared, demand) as lease:
                reply = messages.ModelLoaded(prepared.id, lease.model.vocabulary, 0)
        return reply

    async def _generate(self, prepared: PreparedModel, row: Generate) -> None:
        number, scored, most = row.row, 0, len(row.prompt) + row.max_tokens
        adapter = self._adapters.get((row.model, row.adapter))
        attempts = Attempts(prepared.id, partial(fingerprint, [row]))
        while not attempts.is_done:
            demand = MemoryDemand(
                *(prepared.kv, row.length, most, 1, row.client, row.tier, prepared.most_padding)
            )
            async with (
                self._pool.visit(attempts, prepared, demand, adapter) as lease,
                lease.engine.generate([row]) as feed,
            ):
                lease.began([row])
                attempts.was_sent, is_ended, again = True, False, 0
                while not is_ended:
                    for item in await feed.take():
                        item.row = number  # as the other server knows it
                        match item:
                            case Token(id=id, finish=finish):
                                self._pool.answered(attempts)
                                row.generated.append(id)  # in case the engine is lost
                                is_ended = finish is not None
                                self._send(messages.StepOutput(row.model, [item], 0, 0, 0))
                                continue
                            case PromptLogprobs(logprobs=logprobs):
                                self._pool.answered(attempts)
                                item.logprobs = logprobs[max(0, scored - again) :]
                                again += len(logprobs)
                                scored = max(scored, again)
                            case messages.RowLeftGrammar():
                                is_ended = True
                        self._send(item)
                    await self._writer.drain()
                    while number in self._paused:
                        await self._unpaused.wait()


def _failure(command: Generate | Embed | Asked, number: int, error: Exception) -> Report:
    message = message_of(error)
    match command:
        case messages.LoadModel(model):
            return messages.CommandFailed("LoadModel", model, message)
        case messages.LoadAdapter(model, adapter):
            return messages.CommandFailed("LoadAdapter", model, message, adapter)
        case messages.MeasureCache(model):
            return messages.CommandFailed("MeasureCache", model, message, of_files=True)
    known = type(error).__name__ if isinstance(error, ServerError) else ""
    return messages.RowFailed(number, message, error=known)
