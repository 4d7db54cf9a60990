"""Parses and repairs an upstream's structured calls."""

import json
from collections.abc import Iterator, Mapping, Sequence

from mlx_server import limits
from mlx_server.events import RepairKind
from mlx_server.json_bounds import ExceedsBounds
from mlx_server.messages import Tool
from mlx_server.parsers.misplaced_calls import MisplacedCallReader
from mlx_server.repair.allowed import RepairPolicy
from mlx_server.repair.model_json import Malformed, bounded, json_text
from mlx_server.tool_parsers.calls import ToolCallEmitter
from mlx_server.upstream.collected_calls import CollectedCall

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
