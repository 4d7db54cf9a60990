"""Schemas compiled once: what is not enforced of each, and its grammar."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from mlx_server import limits
from mlx_server.errors import CompilerUnavailable, InvalidGrammar
from mlx_server.sandbox.parent import Program, Stopped, WarmProcesses
from mlx_server.schemas.check import measure, written
from mlx_server.schemas.messages import Compile, Compiled, Convert, Refused, Reply, Request
from mlx_server.schemas.report import UnsupportedKeyword

CHILD = str(Path(__file__).with_name("child.py"))
"""It is not imported here: llguidance stays out of the server's process."""

PROCESSES = WarmProcesses(
    Program(
        CHILD,
        "compiles schemas and checks answers",
        memory=limits.SCHEMA_MEMORY.value,
        largest=8 * limits.SCHEMA_BYTES.value,
        unavailable=CompilerUnavailable,
    ),
    limits.SCHEMA_PROCESSES.value,
    limits.IDLE_SCHEMA_PROCESSES.value,
)

_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class CompiledSchema:
    def __init__(self, found: Compiled) -> None:
        self.grammar = found.grammar
        self.gaps = [UnsupportedKeyword(*gap) for gap in found.gaps]

    def require_all(self) -> None:
        """Raises InvalidGrammar if a part of the schema is not enforced."""
        for gap in self.gaps:
            raise gap.refusal()

    @property
    def unenforced(self) -> tuple[str, ...]:
        return tuple(map(str, self.gaps))


def warm() -> None:
    """Starts a process in advance, for which the first schema would have to wait."""
    with suppress(CompilerUnavailable), PROCESSES.one():
        pass


def compiled(schema: Any) -> CompiledSchema:
    """Raises InvalidGrammar if it can't be used. May take as long as limits.SCHEMA_SECONDS."""
    text = written(schema)

    def make() -> CompiledSchema:
        measure(schema)
        return CompiledSchema(_answered(Compile(text, limits.SCHEMA_SECONDS.value)))

    with _stopped_is_refused("schema"):
        return _schemas.get(text, make)


def lark_of(gbnf: str) -> str:
    """A grammar in GBNF, llama.cpp's notation, as Lark."""
    with _stopped_is_refused("grammar"):
        return _answered(Convert(gbnf, limits.SCHEMA_SECONDS.value)).grammar


def ask(request: Request) -> Reply:
    """Raises Stopped."""
    with PROCESSES.one() as own:
        packed, _ = own.ask(bytearray(msgspec.msgpack.encode(request)), request.seconds)
    return _replies.decode(packed)


def _answered(request: Request) -> Compiled:
    reply = ask(request)
    if isinstance(reply, Compiled):
        return reply
    assert isinstance(reply, Refused)
    raise InvalidGrammar(reply.message)


@contextmanager
def _stopped_is_refused(what: str) -> Iterator[None]:
    """It is not remembered: on a busy machine the clock may have stopped it."""
    try:
        yield
    except Stopped as why:
        raise InvalidGrammar(
            f"The {what} can't be used: compiling it {why}. Make it simpler."
        ) from None


class _Known:
    """What was compiled before, and what was refused, by its text."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, CompiledSchema | str] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str, make: Callable[[], CompiledSchema]) -> CompiledSchema:
        with self._lock:
            found = self._found.get(text)
            if found is not None:
                self._found.move_to_end(text)
        if found is None:
            try:
                found = make()
            except InvalidGrammar as error:
                found = error.message
            self._keep(text, found)
        if isinstance(found, str):
            raise InvalidGrammar(found)
        return found

    def _keep(self, text: str, found: CompiledSchema | str) -> None:
        with self._lock:
            self._found[text] = found
            while len(self._found) > limits.COMPILED_SCHEMAS.value:
                self._found.popitem(last=False)


_schemas = _Known()
