"""Writes the events of one call, as a call format reads it."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from mlx_server.events import (
    Event,
    Repaired,
    RepairKind,
    ToolCallDelta,
    ToolCallFinished,
    Violation,
)
from mlx_server.messages import Tool
from mlx_server.repair.allowed import RepairPolicy
from mlx_server.repair.call_shapes import unwrapped
from mlx_server.repair.coerce import read_as, read_tree, takes_text
from mlx_server.repair.model_json import Malformed
from mlx_server.schemas.lenient import properties_in, required, types_of_member
from mlx_server.tool_parsers.argument_check import argument_errors
from mlx_server.tool_parsers.arguments import coerce_arguments, json_of

ARGUMENTS = ".function.arguments"


class Emitter(Protocol):
    """What a call needs of the calls of its answer."""

    allowed: RepairPolicy

    def knows(self, name: str) -> bool: ...

    def emit(self, event: Event) -> None: ...

    def retract(self) -> bool:
        """Takes back the call's arguments, unless some of them have been reported. Returns whether
        that was done."""


class ToolCallWriter:
    """Writes one call: its arguments are an object, written key by key, and once."""

    def __init__(self, calls: Emitter, tool: Tool, index: int, number: int) -> None:
        self.number = number
        self.name = tool.name
        self.is_strict = tool.strict
        """Whether a grammar holds the arguments to their schema, so that they have no mistakes."""
        self._calls = calls
        self._schema: Mapping[str, Any] = tool.parameters
        self._index = index
        self._written: list[str] = []
        self._keys: set[str] = set()
        self._repairs: dict[Repaired, None] = {}
        """The repairs of this call in order, each once."""
        self._open = False
        """Whether the string of a streamed parameter is not closed yet."""
        self.lacks_arguments = False
        """Whether required arguments are missing at its end."""
        self._repeats = False
        """Whether a key is written twice. Readers of JSON take the last value."""

    @property
    def arguments(self) -> str:
        """The arguments as JSON text, as far as they are written."""
        return "".join(self._written)

    def lacks(self, key: str) -> bool:
        """Whether a required parameter other than `key` has no value."""
        return not self._keys.issuperset(set(required(self._schema)) - {key})

    def knows(self, tool: str) -> bool:
        return self._calls.knows(tool)

    def same_as(self, other: "ToolCallWriter") -> bool:
        return (self.name, self.arguments) == (other.name, other.arguments)

    @property
    def known(self) -> frozenset[str]:
        """The parameters that the tool's schema lists."""
        return frozenset(properties_in(self._schema))

    @property
    def awaited(self) -> frozenset[str]:
        """The required arguments that have no value yet."""
        return self.known - self._keys

    def meant(self, key: str) -> str:
        """Returns the parameter that a key means, which may be written with white space around
        it."""
        if key in self.known or key.strip() not in self.known:
            return key
        self.repaired()
        return key.strip()

    def streams(self, key: str) -> bool:
        """Whether text for this parameter is certain to stay the text it is."""
        return key not in self._keys and takes_text(self._schema, key)

    def add_repair(self, what: RepairKind, part: str = "") -> None:
        """part: the path of what was repaired, within the call."""
        self._repairs[Repaired(self._index, what, f"tool_calls[{self.number}]{part}")] = None

    @property
    def may_be_repaired(self) -> bool:
        return self._calls.allowed.json

    def repaired(self, what: RepairKind = "json") -> None:
        """Reports a mistake in how the arguments are written; Malformed if none may be repaired."""
        if not self._calls.allowed.json:
            raise Malformed("a mistake that may not be repaired")
        self.add_repair(what, "" if what == "format" else ARGUMENTS)

    def value(self, key: str, value: Any) -> None:
        """Writes a parameter that is complete. Of one that is given twice the last value counts."""
        self._put(key, self._fitted(key, value))

    def leave_empty(self, key: str) -> None:
        """Writes a parameter whose value is missing: an empty text, or nothing if it can't be
        text."""
        self.repaired()
        if "string" in types_of_member(self._schema, key):
            self._put(key, "")
        elif key in required(self._schema):
            raise Malformed("a required value is missing")

    def untyped(self, key: str, text: str) -> bool:
        """Writes a value like `value`, from a format that has every value as bare text. Returns
        whether it is text."""
        takes_string = "string" in types_of_member(self._schema, key)
        if not (text.strip() or takes_string or key in required(self._schema)):
            self.leave_empty(key)
            return False
        found = read_as(text, self._schema, key, self.repaired)
        self._put(key, found)
        return isinstance(found, str)

    def untyped_tree(self, key: str, value: Any) -> None:
        """Applies `untyped` to lists and objects in which every value is such a text."""
        self._put(key, read_tree(value, self._schema, key, self.repaired))

    def _put(self, key: str, value: Any) -> None:
        if (inside := self._unwrapped(key, value)) is not None:
            for name, argument in inside.items():
                self._put(name, self._fitted(name, argument))
            return
        if key == value == "":  # the model filled in the format although it had no argument
            self.repaired()
            return
        if key in self._keys:
            self.repaired()
            self._repeats = True
        self._write(self._label(key) + json_of(value))

    def _unwrapped(self, key: str, value: Any) -> Mapping[str, Any] | None:
        inside = unwrapped(key, value, self.known) if self._calls.allowed.json else None
        if inside is not None:
            self.add_repair("format", ARGUMENTS)
        return inside

    def _fitted(self, key: str, value: Any) -> Any:
        (found,) = coerce_arguments({key: value}, self._schema, self._calls.allowed).values()
        if json_of(found) != json_of(value):
            self.add_repair("type", self._path(key))
        return found

    def _path(self, key: str) -> str:
        """Returns the path of an argument; of all arguments if the schema does not name it."""
        return f"{ARGUMENTS}.{key}" if key in self.known else ARGUMENTS

    def text(self, key: str, piece: str) -> None:
        """Writes a piece of a parameter's text; `end_text` follows the last one."""
        if not self._open:
            self._write(self._label(key) + '"')
            self._open = True
        self._write(json_of(piece)[1:-1])

    def end_text(self, key: str) -> None:
        if not self._open:
            self.text(key, "")
        self._write('"')
        self._open = False

    def finish(self) -> None:
        self._write("}" if self._written else "{}")
        self._end()

    def finish_with(self, arguments: Mapping[str, Any]) -> None:
        """Writes all arguments at once; the beginning of them may already be written."""
        if len(arguments) == 1:
            ((key, value),) = arguments.items()
            inside = self._unwrapped(key, value)
            arguments = arguments if inside is None else inside
        whole = json_of({key: self._fitted(key, value) for key, value in arguments.items()})
        if not whole.startswith(self.arguments):
            raise Malformed("the arguments are not those that were begun")
        self._write(whole[len(self.arguments) :])
        self._end()

    def _end(self) -> None:
        arguments = json.loads(self.arguments)
        if self._repeats and self._calls.retract():
            self._written = []
            self._write(json_of(arguments))
        for repair in self._repairs:
            self._calls.emit(repair)
        self.lacks_arguments = not arguments.keys() >= set(required(self._schema))
        for key, wrong in argument_errors(arguments, self._schema):
            path = self._path(key) if key in arguments else f"{ARGUMENTS}.{key}"
            what = f"tool_calls[{self.number}]{path}: {wrong}"
            self._calls.emit(Violation(self._index, what))
        self._calls.emit(ToolCallFinished(self._index, self.number))

    def _label(self, key: str) -> str:
        self._keys.add(key)
        return (", " if self._written else "{") + json_of(key) + ": "

    def _write(self, piece: str) -> None:
        if piece:
            self._written.append(piece)
            self._calls.emit(ToolCallDelta(self._index, self.number, piece))
