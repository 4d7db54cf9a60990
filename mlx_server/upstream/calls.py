"""Joins the pieces of an upstream's structured calls, then parses and repairs the calls.

Whether a piece continues a call or begins another one is decided by what is known of the call so
far, never by reading all of it again: an upstream may send any number of pieces.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import msgspec

from mlx_server import limits
from mlx_server.errors import UpstreamFailed
from mlx_server.events import (
    Answer,
    CallSoFar,
    Event,
    RepairKind,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    folded,
)
from mlx_server.json_bounds import ExceedsBounds
from mlx_server.messages import Tool
from mlx_server.parsers.misplaced_calls import MisplacedCallReader
from mlx_server.requests import RepairPolicy
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.tool_parsers.model_json import Malformed, bounded, json_text
from mlx_server.upstream.pieces import CallPiece, GrowingText


class CollectedCall:
    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.extra_content: dict[str, Any] = {}
        """The fields of all pieces, of which later ones take precedence."""
        self.extra_size = 0
        """The number of bytes of the extra contents that came."""
        self._arguments = GrowingText()
        self._last_extra = b""

    @property
    def arguments(self) -> str:
        return str(self._arguments)

    @property
    def size(self) -> int:
        """The number of characters of its name and arguments."""
        return len(self.name) + self._arguments.size

    def add(self, piece: CallPiece) -> None:
        self.id, self.name = self.id or piece.id, self.name or piece.name
        encoded = msgspec.json.encode(piece.extra_content) if piece.extra_content else b""
        if encoded and encoded != self._last_extra:  # some servers send the same in each piece
            self._last_extra = encoded
            self.extra_content |= piece.extra_content
            self.extra_size += len(encoded)
        self._arguments.add(piece.arguments)

    def ends_before(self, piece: CallPiece) -> bool:
        """Whether a piece with the index of this call begins another one: older versions of Ollama
        give all calls the index 0."""
        return bool(piece.name and piece.id and self.id and piece.id != self.id)

    def as_text(self) -> str:
        """The call as JSON, which becomes text of the answer if no tool can be called with it."""
        return json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)


class CollectedCalls:
    """The structured calls of one answer, in their order."""

    def __init__(self) -> None:
        self.calls: list[CollectedCall] = []
        self.size = 0
        """The number of characters of their names and arguments."""
        self.extra_size = 0
        """The number of bytes of their extra contents."""
        self._by_index: dict[int, CollectedCall] = {}

    def add(self, piece: CallPiece) -> None:
        call = self._call_of(piece)
        before, extra_before = call.size, call.extra_size
        call.add(piece)
        self.size += call.size - before
        self.extra_size += call.extra_size - extra_before

    def _call_of(self, piece: CallPiece) -> CollectedCall:
        """The call that a piece belongs to, or a new one. Gemini sends no indices: each of its
        pieces with a name is a call, and one without continues the last."""
        if piece.index is None:
            found = None if piece.name or not self.calls else self.calls[-1]
        else:
            found = self._by_index.get(piece.index)
            if found and found.ends_before(piece):
                found = None
        return found or self._new(piece.index)

    def _new(self, index: int | None) -> CollectedCall:
        if len(self.calls) >= limits.UPSTREAM_CALLS:
            raise UpstreamFailed("The upstream sent more calls than one answer may have.")
        call = CollectedCall()
        self.calls.append(call)
        if index is not None:
            self._by_index[index] = call
        return call


class EchoedCalls:
    """Recognises structured calls that were also in the text or in the thoughts."""

    def __init__(self) -> None:
        self._answers = defaultdict[str, Answer](Answer)
        """The calls of the text and of the thoughts."""
        self._left: Counter[tuple[str, str]] | None = None

    def add(self, source: str, event: ToolCallStarted | ToolCallDelta) -> None:
        self._answers[source].add(event)

    def new_in(self, events: list[Event]) -> list[Event]:
        """The events without those of calls that were in the text or the thoughts. Each call there
        removes only one structured call."""
        if not self._answers:
            return events
        if self._left is None:
            begun = (each.begun_calls.values() for each in self._answers.values())
            self._left = Counter(map(_canonical, chain.from_iterable(begun)))
        again = set[int]()
        for number, call in folded(events).begun_calls.items():
            if self._left[written := _canonical(call)]:
                self._left[written] -= 1
                again.add(number)
        kinds = ToolCallStarted | ToolCallDelta | ToolCallFinished
        return [e for e in events if not (isinstance(e, kinds) and e.call in again)]


def _canonical(call: CallSoFar) -> tuple[str, str]:
    """The call's name and arguments in a form that is equal for equal calls."""
    arguments = "".join(call.arguments)
    with suppress(ValueError, RecursionError):
        arguments = json.dumps(json.loads(arguments), sort_keys=True)
    return call.name, arguments


ENCODING_LEVELS = 4
"""The most times that arguments may be encoded as a JSON string within a JSON string."""


class StructuredCallReader:
    """Parses and repairs collected calls, and emits those that call the request's tools."""

    def __init__(
        self, emitter: ToolCallEmitter, tools: Sequence[Tool], allowed: RepairPolicy
    ) -> None:
        self._emitter = emitter
        self._tools = {tool.name: tool for tool in tools}
        self._allowed = allowed
        self._nameless = MisplacedCallReader(emitter, tools, allowed, makes=True)

    def read(self, call: CollectedCall) -> bool:
        """Emits the call, or several calls if its arguments are several objects. Returns False if
        it is not a call of a tool."""
        try:
            bounded(call.arguments)
            found = list(self._readable_calls(call))
        except (Malformed, ExceedsBounds):
            return False
        try:
            for i, (name, arguments, repairs) in enumerate(found):
                self._emitter.misplaced = repairs
                self._emitter.whole(name, arguments, call.id if i == 0 else None)
        except Malformed:
            self._emitter.give_up()
            return False
        return True

    def _readable_calls(
        self, call: CollectedCall
    ) -> Iterator[tuple[str, str, tuple[RepairKind, ...]]]:
        listed = _objects_of_list(call.arguments)
        texts = _objects(call.arguments if listed is None else listed)
        texts = [text for text in texts if text.strip("{} \n")] or texts[:1]
        is_other = len(texts) > 1 or listed is not None
        several: tuple[RepairKind, ...] = ("format",) if is_other else ()
        for text in texts:
            inside, repairs = self._arguments_json(text)
            name = call.name
            if not self._emitter.knows(name):
                taker = self._nameless.nameless(inside) if self._allowed.mistakes else None
                if taker is None:
                    raise Malformed("there is no such tool")
                name, repairs = taker.name, ("name", *repairs)
            inside, unwrapped = self._unwrapped(name, inside)
            yield name, inside, (*several, *repairs, *unwrapped)

    def _unwrapped(self, name: str, inside: str) -> tuple[str, tuple[RepairKind, ...]]:
        """The arguments, taken out of a complete call that was written in their place."""
        tool = self._tools.get(name)
        properties = tool.parameters.get("properties") if tool else None
        takes_a_name = isinstance(properties, Mapping) and "name" in properties
        if not (self._allowed.mistakes and '"name"' in inside) or takes_a_name:
            return inside, ()
        try:
            match json.loads(inside):
                case {"name": again, "arguments": dict(found)} if again == name:
                    return json.dumps(found, ensure_ascii=False), ("format",)
                case {"name": again, "parameters": dict(found)} if again == name:
                    return json.dumps(found, ensure_ascii=False), ("format",)
        except (ValueError, RecursionError):
            pass  # the check of the call reports invalid JSON
        return inside, ()

    def _arguments_json(self, text: str) -> tuple[str, tuple[RepairKind, ...]]:
        """The JSON of a call's arguments, which may be within prose or encoded again. Raises
        Malformed if there is none."""
        if not text.strip() or text.strip() == "null":
            return "{}", ()
        if self._allowed.mistakes and (braced := _braced(text)):
            return braced, ("json",)
        found = json_text(text) if self._allowed.mistakes else (text, ())
        if found is None:
            raise Malformed("no JSON")
        inside, repairs = found
        if inside.startswith('"'):  # the object was encoded as a string again
            return _unquoted(inside), ("json",)
        return inside, repairs


def _braced(text: str) -> str | None:
    """The object for a text that lacks only its braces; None for any other text."""
    inside = text.strip().rstrip(",")
    if not inside.startswith('"') or len(inside) > limits.READ_JSON_CHARACTERS:
        return None
    try:
        json.loads(f"{{{inside}}}")
    except (ValueError, RecursionError):
        return None
    return f"{{{inside}}}"


def _unquoted(text: str) -> str:
    for _ in range(ENCODING_LEVELS):
        found = json.loads(text)
        if not isinstance(found, str):
            raise Malformed("no object")
        text = found
        if not text.startswith('"'):
            break
    return text


def _objects_of_list(text: str) -> str | None:
    """The objects of a JSON list, written one after the other; None for any other text."""
    if len(text) > limits.READ_JSON_CHARACTERS or not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_list = isinstance(found, list) and found and all(isinstance(each, dict) for each in found)
    return "".join(json.dumps(each, ensure_ascii=False) for each in found) if is_list else None


def _objects(text: str) -> list[str]:
    """The JSON objects in a text that consists of several; for any other text, only the text."""
    decoder, at, found = json.JSONDecoder(), 0, list[str]()
    size = len(text)
    if size > limits.READ_JSON_CHARACTERS:
        return [text]
    while True:
        while at < size and (text[at].isspace() or (found and text[at] in ",;")):
            at += 1
        if at == size:
            return found if len(found) > 1 else [text]
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return [text]
        if not isinstance(value, dict) or len(found) >= limits.UPSTREAM_CALLS:
            return [text]
        found.append(text[at:end])
        at = end
