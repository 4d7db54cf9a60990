"""Joins the pieces of an upstream's structured calls, then parses and repairs the calls.

Whether a piece continues a call or begins another one is decided by what is known of the call so
far, never by reading all of it again: an upstream may send any number of pieces.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from mlx_server import limits
from mlx_server.errors import UpstreamFailed
from mlx_server.events import RepairKind
from mlx_server.json_bounds import ExceedsBounds
from mlx_server.messages import Tool
from mlx_server.parsers.misplaced_calls import MisplacedCallReader
from mlx_server.repair.allowed import RepairPolicy
from mlx_server.repair.model_json import Malformed, bounded, json_text
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.upstream.pieces import CallPiece, GrowingText

OPENING, CLOSING = "{[", "}]"


class MergedObjects:
    """JSON objects that come one after the other. They are kept as JSON, which takes less memory
    than their values."""

    def __init__(self) -> None:
        self._objects: list[bytes] = []
        self.size = 0
        """The number of bytes of the JSON."""

    def __bool__(self) -> bool:
        return bool(self._objects)

    def add(self, found: Mapping[str, Any] | str) -> None:
        encoded = found.encode() if isinstance(found, str) else msgspec.json.encode(found)
        if encoded not in self._objects[-1:]:  # some servers send the same object in each piece
            self._objects.append(encoded)
            self.size += len(encoded)

    def merged(self) -> dict[str, Any]:
        """One object with the fields of all, of which later ones take precedence."""
        return {k: v for each in self._objects for k, v in msgspec.json.decode(each).items()}


class ObjectProgress:
    """Whether the pieces of a JSON text so far are a whole object. Only its brackets are read, so
    an object may still have a mistake."""

    def __init__(self) -> None:
        self._first = ""
        self._rest = ""
        """A backslash that ended the last piece."""
        self._depth = 0
        self._in_string = False

    @property
    def is_whole(self) -> bool:
        return self._first == "{" and not (self._depth or self._in_string)

    def add(self, piece: str) -> None:
        self._first = self._first or piece.lstrip()[:1]
        text = self._rest + piece
        self._rest = "\\" * ((len(text) - len(text.rstrip("\\"))) % 2)
        parts = text.replace("\\\\", "").replace('\\"', "").split('"')
        outside = "".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        self._depth += sum(map(outside.count, OPENING)) - sum(map(outside.count, CLOSING))


class CollectedCall:
    def __init__(self) -> None:
        self.id = ""
        self.is_misnumbered = False
        self._name, self._text = GrowingText(), GrowingText()
        self._objects, self._extra = MergedObjects(), MergedObjects()
        self._size_of_objects = 0
        self._progress = ObjectProgress()
        self._is_blank = True
        """Whether the arguments have only braces and spaces so far."""

    @property
    def name(self) -> str:
        return str(self._name)

    @property
    def arguments(self) -> str:
        found = self._objects.merged()
        if self._text.size and not found:
            return str(self._text)
        return json.dumps(found, ensure_ascii=False) if self._objects else ""

    @property
    def extra_content(self) -> dict[str, Any]:
        return self._extra.merged()

    @property
    def extra_size(self) -> int:
        """The number of bytes of its extra content."""
        return self._extra.size

    @property
    def size(self) -> int:
        """The number of characters of its name and arguments."""
        return self._name.size + self._text.size + self._size_of_objects

    @property
    def has_arguments(self) -> bool:
        return bool(self._text.size or self._objects)

    @property
    def is_whole(self) -> bool:
        """Whether the arguments so far are a whole object."""
        return bool(self._objects) or self._progress.is_whole

    def add(self, piece: CallPiece) -> None:
        self.id = self.id or piece.id
        self.is_misnumbered = self.is_misnumbered or piece.is_misnumbered
        if piece.extra_content:
            self._extra.add(piece.extra_content)
        self._add_name(piece.name)
        if piece.is_object:
            self._objects.add(piece.arguments)
            self._size_of_objects += len(piece.arguments)
        elif piece.arguments:
            if self._is_repeated_by(piece.arguments):
                self._text, self._progress = GrowingText(), ObjectProgress()
            self._text.add(piece.arguments)
            self._progress.add(piece.arguments)
        self._is_blank = self._is_blank and not piece.arguments.strip("{} \n")

    def is_begun_again_by(self, piece: CallPiece) -> bool:
        """Whether a piece begins a new call, although it has the index of this one."""
        if not piece.name:
            return False
        has_other_id = bool(piece.id and self.id and piece.id != self.id)
        if has_other_id and not self._is_continued_by(piece):
            return True
        if self.is_named_by(piece) or not self.is_whole:
            return False
        if not self._is_named(piece.name):
            return True
        # not if the call has only an empty object so far, or if the same arguments are sent again
        has_both = bool(not self._is_blank and piece.arguments)
        return has_both and not (self._text.size and self._text.begins(piece.arguments))

    def is_named_by(self, piece: CallPiece) -> bool:
        """Whether the piece is only the name of the call, whose arguments arrived first."""
        return not (self._name.size or piece.arguments)

    def as_text(self) -> str:
        """The call as JSON, which becomes text of the answer if no tool can be called with it."""
        return json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)

    def _add_name(self, name: str) -> None:
        if not name or self._is_named(name):
            return
        if self._name.begins(name):  # all of the name is sent again in each piece
            self._name.clear()
        self._name.add(name)

    def _is_named(self, name: str) -> bool:
        return len(name) == self._name.size and self._name.begins(name)

    def _is_repeated_by(self, text: str) -> bool:
        """Whether a piece begins with all arguments so far, which some servers send in each
        piece."""
        return self._text.size > 1 and text.startswith("{") and self._text.begins(text)

    def _is_continued_by(self, piece: CallPiece) -> bool:
        """Whether the piece continues the call's arguments, although it has another id."""
        is_begun = self.has_arguments and not self.is_whole and self._is_named(piece.name)
        more = "" if piece.is_object else piece.arguments
        return is_begun and bool(more) and not more.lstrip().startswith("{")


class CollectedCalls:
    """The structured calls of one answer, in their order."""

    def __init__(self) -> None:
        self.calls: list[CollectedCall] = []
        self.size = 0
        """The number of characters of their names and arguments."""
        self.extra_size = 0
        """The number of bytes of their extra contents."""
        self._by_index: dict[int, CollectedCall] = {}
        self._by_id: dict[str, CollectedCall] = {}

    def add(self, piece: CallPiece) -> None:
        call = self._call_of(piece)
        before, extra_before = call.size, call.extra_size
        call.add(piece)
        self.size += call.size - before
        self.extra_size += call.extra_size - extra_before
        self._by_id.setdefault(call.id, call)

    def _call_of(self, piece: CallPiece) -> CollectedCall:
        """The call that a piece belongs to, or a new one. Its index alone may be misleading, since
        some servers send none, or the same one for all calls."""
        if piece.index is None:
            known = self._by_id.get(piece.id) if piece.id else None
            last = self.calls[-1] if self.calls else None
            begins = bool(piece.name) and (last is None or bool(piece.id) or last.has_arguments)
            begins = begins and not (last and last.is_named_by(piece))
            found = known or (None if begins else last)
        else:
            found = self._by_index.get(piece.index)
            if found and found.is_begun_again_by(piece):
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
                taker = self._nameless.nameless(inside) if self._allowed.names else None
                if taker is None:
                    raise Malformed("there is no such tool")
                name, repairs = taker.name, ("name", *repairs)
            inside, unwrapped = self._unwrapped(name, inside)
            yield name, inside, (*several, *repairs, *unwrapped)

    def _unwrapped(self, name: str, inside: str) -> tuple[str, tuple[RepairKind, ...]]:
        """The arguments, taken out of a complete call that was written in their place."""
        if not (self._allowed.json and '"name"' in inside) or self._takes_a_name(name):
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

    def _takes_a_name(self, name: str) -> bool:
        tool = self._tools.get(name)
        properties = (tool.parameters or {}).get("properties") if tool else None
        return isinstance(properties, Mapping) and "name" in properties

    def _arguments_json(self, text: str) -> tuple[str, tuple[RepairKind, ...]]:
        """The JSON of a call's arguments, which may be within prose or encoded again. Raises
        Malformed if there is none."""
        if not text.strip() or text.strip() == "null":
            return "{}", ()
        if self._allowed.json and (braced := _braced(text)):
            return braced, ("json",)
        found = json_text(text) if self._allowed.json else (text, ())
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
