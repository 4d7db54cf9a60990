"""The engine: token ids in, token ids out. One process, and one thread in it, owns MLX.

`Engine` is a plain object: give it commands, call `step`, read its reports. `main` runs one at the
far end of a socket, as the server's child process.
"""

import gc
import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
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
    Token,
)
from mlx_server.engine.scoring import Scoring, score
from mlx_server.requests import SamplingParams

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
        return bool(self._loads) or self._has_rows

    @property
    def _has_rows(self) -> bool:
        return bool(self._scorings) or any(self._batches.values())

    def handle(self, command: Command) -> list[Report]:
        match command:
            case Load(model, path):
                self._loads[model] = weights.load(Path(path))
            case Generate(row):
                return self._alone(row, partial(self._generate, command))
            case Cancel(rows):
                return self._cancel(rows)
        return []

    def step(self) -> list[Report]:
        """A piece of every load, one of the first scoring, a step of every model that has rows."""
        reports = [self._load(model) for model in list(self._loads)]
        if not self._has_rows:
            return reports
        for row in list(self._scorings)[:1]:
            reports += self._alone(row, partial(self._score, row))
        tokens: list[Token] = []
        for model, batch in self._batches.items():
            try:
                tokens += batch.step() if batch else []
            except Exception as error:
                log.exception("a step of %s failed", model)
                self._batches[model] = Batch(batch.model, concurrency=self._concurrency)
                reports += [RowFailed(row, _said(error)) for row in batch.rows]
        return [*reports, self._stepped(tokens)]

    def _alone(self, row: int, work: Callable[[], list[Report]]) -> list[Report]:
        """What goes wrong with one row ends that row and no other."""
        try:
            return work()
        except Exception as error:
            self._scorings.pop(row, None)
            log.exception("row %d failed", row)
            return [RowFailed(row, _said(error))]

    def _generate(self, command: Generate) -> list[Report]:
        batch = self._batches[command.model]
        _check(command, batch.vocabulary)
        if command.score:
            scoring = score(batch.model, command.prompt, command.sampling.logprobs or 0)
            self._scorings[command.row] = command, scoring
        else:
            self._add(command)
        return [Admitted(command.row, cached_tokens=0)]

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

    def _cancel(self, rows: list[int]) -> list[Report]:
        for row in rows:
            self._scorings.pop(row, None)
            for batch in self._batches.values():
                batch.cancel(row)
        # With no row left there is no step to say that none waits.
        return [] if self._has_rows else [self._stepped([])]

    def _stepped(self, tokens: list[Token]) -> Stepped:
        waiting = len(self._scorings) + sum(batch.waiting for batch in self._batches.values())
        return Stepped(tokens, waiting, mx.get_active_memory())

    def _load(self, model: str) -> Report:
        try:
            return self._load_piece(model)
        except Exception as error:
            self._loads.pop(model, None)
            log.exception("%s did not load", model)
            return LoadFailed(model, _said(error))

    def _load_piece(self, model: str) -> Report:
        try:
            return Loading(model, *next(self._loads[model]))
        except StopIteration as end:
            del self._loads[model]
            network = end.value
        batch = self._batches[model] = Batch(network, concurrency=self._concurrency)
        # A collection walks every module of every model; what is loaded now stays.
        gc.collect()
        gc.freeze()
        return Loaded(model, batch.vocabulary, mx.get_active_memory())


def _check(command: Generate, vocabulary: int) -> None:
    """What gets past here is computed together with other rows, and must not harm them."""
    if not command.prompt:
        raise ValueError("the prompt is empty")
    # MLX checks no index: an id past the end reads, or overwrites, what lies there.
    ids = [*command.prompt, *command.sampling.logit_bias]
    for id in (min(ids), max(ids)):
        if not 0 <= id < vocabulary:
            raise ValueError(f"token id {id} is outside the vocabulary of {vocabulary}")
    if not _in_range(command.sampling):
        raise ValueError("a sampling parameter is out of range")


def _in_range(s: SamplingParams) -> bool:
    penalties = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    return (
        all(map(math.isfinite, (s.temperature, *penalties, *s.logit_bias.values())))
        and s.repetition_penalty > 0
        and s.temperature >= 0
        and s.top_k >= 0
        and s.top_p > 0
        and 0 <= s.min_p <= 1
        and (s.logprobs or 0) >= 0
    )


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
    try:
        with connection.makefile("rb") as stream:
            while len(header := stream.read(messages.HEADER_BYTES)) == messages.HEADER_BYTES:
                inbox.put(stream.read(messages.length(header)))
    finally:  # a server that went with reports unread ends the reading with an error
        os._exit(0)


def main() -> None:
    """`python -m mlx_server.engine.worker SOCKET_FD CONCURRENCY`"""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    connection = socket.socket(fileno=int(sys.argv[1]))
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    ready = Ready(os.getpid(), str(mx.default_device()))
    with suppress(ConnectionError):  # the server is gone
        connection.sendall(messages.frame(messages.encode_reports([ready])))
        serve(Engine(concurrency=int(sys.argv[2])), inbox, connection.sendall)


if __name__ == "__main__":
    main()
