"""Compiles each schema once, to its grammar and the list of what the grammar does not enforce, in a
process of its own (child.py)."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from mlx_server import limits
from mlx_server.errors import CompilerTooSlow, CompilerUnavailable, InvalidGrammar
from mlx_server.grammars.check import measure, written
from mlx_server.grammars.grammar import UnsupportedKeyword
from mlx_server.system.sandbox.parent import OutOfTime, Program, Stopped, WarmProcesses


class Compile(msgspec.Struct, array_like=True, tag=True):
    schema: str
    """The schema as JSON."""
    seconds: float
    """Limit on processor time; four times as much wall-clock time is allowed."""


class ConvertGbnf(msgspec.Struct, array_like=True, tag=True):
    gbnf: str
    seconds: float


class CheckValue(msgspec.Struct, array_like=True, tag=True):
    value: str
    """The value as JSON; the schema is JSON too."""
    schema: str
    seconds: float


class Compiled(msgspec.Struct, array_like=True, tag=True):
    grammar: str
    """The schema as llguidance gets it, or a grammar in Lark."""
    unsupported: list[UnsupportedKeyword] = []
    """What the grammar does not enforce."""

    def require_all(self) -> None:
        """Raises InvalidGrammar if a part of the schema is not enforced."""
        for keyword in self.unsupported:
            raise keyword.refusal()

    @property
    def unenforced(self) -> tuple[str, ...]:
        return tuple(map(str, self.unsupported))


class SchemaRefused(msgspec.Struct, array_like=True, tag=True):
    message: str


class CheckedValue(msgspec.Struct, array_like=True, tag=True):
    errors: list[str]
    """The violations of the schema, each as "path: message"."""


Request = Compile | ConvertGbnf | CheckValue
Reply = Compiled | CheckedValue | SchemaRefused


CHILD = str(Path(__file__).with_name("child.py"))
"""This file is not imported here, because llguidance stays out of the server process."""

PROCESSES = WarmProcesses(
    Program(
        CHILD,
        "compiles schemas and checks answers",
        memory=limits.SCHEMA_MEMORY,
        largest=8 * limits.SCHEMA_BYTES,
        unavailable=CompilerUnavailable,
    ),
    limits.SCHEMA_PROCESSES,
    limits.IDLE_SCHEMA_PROCESSES,
    limits.CLIENT_SCHEMA_PROCESSES,
)

_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def warm() -> None:
    """Starts a process in advance, so that the first schema does not wait for it."""
    with suppress(CompilerUnavailable), PROCESSES.one():
        pass


def compiled(schema: Any) -> Compiled:
    """Compiles a schema, or takes it from the cache. Raises InvalidGrammar if it can't be used, and
    CompilerTooSlow.

    It may take up to four times limits.SCHEMA_SECONDS.
    """
    with _stopped_for_client("schema"):
        reply = _reply_to(written(schema))
    if isinstance(reply, str):
        raise InvalidGrammar(reply)
    return reply


@lru_cache(limits.COMPILED_SCHEMAS)
def _reply_to(schema: str) -> Compiled | str:
    """Returns the message if the schema can't be used."""
    try:
        measure(json.loads(schema))
        return _answered(Compile(schema, limits.SCHEMA_SECONDS))
    except InvalidGrammar as refusal:
        return refusal.message
    except RecursionError:
        return f"The schema can't be used: it is nested deeper than {limits.SCHEMA_DEPTH} levels."


def lark_of(gbnf: str) -> str:
    """Converts a grammar from GBNF, llama.cpp's notation, to Lark."""
    with _stopped_for_client("grammar"):
        return _answered(ConvertGbnf(gbnf, limits.SCHEMA_SECONDS)).grammar


def ask(request: Request) -> Reply:
    """Sends a request to a compiler process. Raises Stopped if it exceeds a limit."""
    with PROCESSES.one() as own:
        packed, _ = own.ask(bytearray(msgspec.msgpack.encode(request)), request.seconds)
    return _replies.decode(packed)


def _answered(request: Request) -> Compiled:
    reply = ask(request)
    if isinstance(reply, Compiled):
        return reply
    assert isinstance(reply, SchemaRefused)
    raise InvalidGrammar(reply.message)


@contextmanager
def _stopped_for_client(what: str) -> Iterator[None]:
    """Turns Stopped into an error for the client, which is not cached.

    Only a limit of work refuses. Time depends on what else the machine does, so a retry may pass.
    """
    try:
        yield
    except OutOfTime as why:
        raise CompilerTooSlow(
            f"The {what} is not compiled: it {why}, perhaps because the machine is busy. "
            "Try again, or make it simpler."
        ) from None
    except Stopped as why:
        raise InvalidGrammar(
            f"The {what} can't be used: compiling it {why}. Make it simpler."
        ) from None
