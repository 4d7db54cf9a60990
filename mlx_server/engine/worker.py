"""The engine: token ids in, token ids out. One process, and one thread in it, owns MLX.

`Engine` is a plain object: give it commands, call `step`, read its reports. `main` runs one at the
far end of a socket, as the server's child process.
"""

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.engine import messages, weights
from mlx_server.engine.batch import Batch
from mlx_server.engine.messages import (
    Admitted,
    Cancel,
    Command,
    Generate,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    Ready,
    Report,
    RowFailed,
    Scored,
    Stepped,
)
from mlx_server.engine.scoring import Scoring, score

log = logging.getLogger("mlx_server.engine")

Progress = Generator[tuple[int, int], None, nn.Module]


class Engine:
    def __init__(self, *, concurrency: int = 16) -> None:
        self._concurrency = concurrency
        self._loads: dict[str, Progress] = {}
        self._batches: dict[str, Batch] = {}
        self._scorings: dict[int, tuple[Generate, Scoring]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._loads or self._scorings) or any(self._batches.values())

    def handle(self, command: Command) -> list[Report]:
        match command:
            case Load(model, path):
                self._loads[model] = weights.load(Path(path))
            case Generate():
                return [self._generate(command)]
            case Cancel(rows):
                for row in rows:
                    self._scorings.pop(row, None)
                    for batch in self._batches.values():
                        batch.cancel(row)
        return []

    def step(self) -> list[Report]:
        """One piece of every load and scoring, and one step of every model that has rows."""
        loads = [report for model in list(self._loads) for report in self._load(model)]
        scores = [report for row in list(self._scorings) for report in self._score(row)]
        steps = [r for model, b in self._batches.items() if b for r in self._step(model, b)]
        return loads + scores + steps

    def _generate(self, command: Generate) -> Report:
        try:
            if command.score:
                network = self._batches[command.model].model
                top = command.sampling.logprobs or 0
                self._scorings[command.row] = command, score(network, command.prompt, top)
            else:
                self._add(command)
        except Exception as error:
            log.exception("row %d was not taken", command.row)
            return RowFailed(command.row, _said(error))
        return Admitted(command.row, cached_tokens=0)

    def _add(self, command: Generate, cache: list[Any] | None = None) -> None:
        self._batches[command.model].add(
            command.row,
            command.prompt,
            command.max_tokens,
            command.stop_tokens,
            command.sampling,
            cache,
        )

    def _score(self, row: int) -> list[Report]:
        command, scoring = self._scorings[row]
        try:
            next(scoring)
            return []
        except StopIteration as end:
            del self._scorings[row]
            logprobs, cache = end.value
            if command.max_tokens:
                self._add(command, cache)
            return [Scored(row, logprobs)]
        except Exception as error:
            del self._scorings[row]
            log.exception("row %d was not scored", row)
            return [RowFailed(row, _said(error))]

    def _load(self, model: str) -> list[Report]:
        try:
            return [Loading(model, *next(self._loads[model]))]
        except StopIteration as end:
            del self._loads[model]
            return [self._loaded(model, end.value)]
        except Exception as error:
            del self._loads[model]
            log.exception("%s did not load", model)
            return [LoadFailed(model, _said(error))]

    def _loaded(self, model: str, network: nn.Module) -> Report:
        batch = self._batches[model] = Batch(network, concurrency=self._concurrency)
        # A collection walks every module of every model; what is loaded now stays.
        gc.collect()
        gc.freeze()
        return Loaded(model, batch.vocabulary, mx.get_active_memory())

    def _step(self, model: str, batch: Batch) -> list[Report]:
        try:
            tokens = batch.step()
        except Exception as error:
            log.exception("a step of %s failed", model)
            self._batches[model] = Batch(batch.model, concurrency=self._concurrency)
            return [RowFailed(row, _said(error)) for row in batch.rows]
        return [Stepped(tokens, batch.waiting, mx.get_active_memory())]


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def serve(engine: Engine, inbox: "queue.SimpleQueue[bytes]", send: Callable[[bytes], None]) -> None:
    """Commands as they come, a step, one frame of reports; sleeps while there is nothing to do."""
    while True:
        reports = [r for c in _take(inbox, wait=not engine.busy) for r in engine.handle(c)]
        reports += engine.step()
        if reports:
            send(messages.frame(messages.encode_reports(reports)))


def _take(inbox: "queue.SimpleQueue[bytes]", *, wait: bool) -> list[Command]:
    taken = [messages.decode_command(inbox.get())] if wait else []
    while not inbox.empty():
        taken.append(messages.decode_command(inbox.get()))
    return taken


def _receive(connection: socket.socket, inbox: "queue.SimpleQueue[bytes]") -> None:
    """Runs beside the MLX thread, so that the child goes with its server even in a long step."""
    with connection.makefile("rb") as stream:
        while len(header := stream.read(messages.HEADER_BYTES)) == messages.HEADER_BYTES:
            inbox.put(stream.read(messages.length(header)))
    os._exit(0)


def main() -> None:
    """`python -m mlx_server.engine.worker SOCKET_FD CONCURRENCY`"""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    connection = socket.socket(fileno=int(sys.argv[1]))
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    ready = Ready(os.getpid(), str(mx.default_device()))
    connection.sendall(messages.frame(messages.encode_reports([ready])))
    serve(Engine(concurrency=int(sys.argv[2])), inbox, connection.sendall)


if __name__ == "__main__":
    main()
