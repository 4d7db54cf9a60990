"""Joins the pieces of an upstream's structured calls.

Whether a piece continues a call or begins another one is decided by what is known of the call so
far, never by reading all of it again: an upstream may send any number of pieces.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from mlx_server import limits
from mlx_server.errors import UpstreamFailed
from mlx_server.upstream.call_pieces import CallPiece
from mlx_server.upstream.growing_text import GrowingText

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
