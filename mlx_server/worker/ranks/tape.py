"""The inputs of a group's steps: rank 0 records them, and the other ranks repeat them."""

import os
import queue
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from mlx_server.engine.messages import Command, Generate
from mlx_server.worker.inputs import OwnInputs

Input = list[Command] | float | bool
"""The commands of a step, a reading of the clock, or whether a task has ended."""

T = TypeVar("T", list[Command], float, bool)

encode_input = msgspec.msgpack.Encoder().encode
decode_input = msgspec.msgpack.Decoder(list[Command] | float | bool).decode


class Diverged(Exception):
    """This rank asks for another kind of input than rank 0 did: it has not taken the same steps."""


class RecordedInputs:
    """The inputs of rank 0: each is sent to the other ranks as soon as it is read."""

    def __init__(self, own: OwnInputs, record: Callable[[bytes], None]) -> None:
        self._own, self._record = own, record

    def clock(self) -> float:
        now = self._own.clock()
        self._record(encode_input(now))
        return now

    def is_done(self, task: Future[Any]) -> bool:
        done = self._own.is_done(task)
        self._record(encode_input(done))
        return done

    def wake(self) -> None:
        self._own.wake()

    def take(self, pause: float | None) -> list[Command]:
        commands = self._own.take(pause)
        for command in commands:
            if isinstance(command, Generate):
                command.sampling = _seeded(command)
        self._record(encode_input(commands))
        return commands


def _seeded(command: Generate) -> Any:
    """Gives a row without a seed one that is the same on all ranks. By itself each rank would draw
    another."""
    if command.sampling.seed is not None:
        return command.sampling
    return replace(command.sampling, seed=int.from_bytes(os.urandom(7)))


class RepeatedInputs:
    """The inputs of a rank other than 0: those that rank 0 recorded."""

    def __init__(self, inputs: "queue.SimpleQueue[Input]") -> None:
        self._inputs = inputs

    def clock(self) -> float:
        return self._next(float)

    def is_done(self, task: Future[Any]) -> bool:
        done = self._next(bool)
        if done:
            wait([task])
        return done

    def wake(self) -> None:
        pass

    def take(self, pause: float | None) -> list[Command]:
        return self._next(list)

    def _next(self, kind: type[T]) -> T:
        found = self._inputs.get()
        if not isinstance(found, kind):
            raise Diverged(f"rank 0 read {type(found).__name__} where this rank read {kind}")
        return found
