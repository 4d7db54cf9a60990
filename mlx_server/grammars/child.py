"""Compiles schemas and checks values: the program of a warm process, `child.py MEMORY LIFELINE`.

llguidance can't be interrupted, so it runs where the operating system can end it. The threads of
this process have stacks as large as those that compile in the engine, so that both fail alike.
"""

import gc
import json
import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from llguidance.gbnf_to_lark import gbnf_to_lark
from referencing import Registry

from mlx_server import limits
from mlx_server.errors import InvalidGrammar
from mlx_server.grammars.check import check
from mlx_server.grammars.compiled import (
    CheckedValue,
    CheckValue,
    Compile,
    Compiled,
    ConvertGbnf,
    Reply,
    Request,
    SchemaRefused,
)
from mlx_server.grammars.compiler import STACK_BYTES, fault, text_fault
from mlx_server.grammars.grammar import (
    JSON,
    UnsupportedKeyword,
    simplified_text,
    unsupported_keywords,
    visited,
)
from mlx_server.grammars.view import (
    DEFINITIONS,
    Part,
    Schema,
    View,
    flattened,
    pointer,
    properties_in,
    refused,
    required_by,
)
from mlx_server.system.sandbox.child import (
    end_with_server,
    enter_sandbox,
    serve,
    time_limit,
)

MOST_JOINED = 16
"""The most schemas that are read of an option; more of them could only exclude more values."""

UNSATISFIABLE = "Unsatisfiable schema: "
MOST_TRIED = 64
"""The most parts of a schema that are tried alone, to say which of them can't be met."""

NICENESS = 5
"""Answers that are being generated come before schemas, where the machine is busy."""

LONG_TEXT = 500
"""The number of characters that a text may or must have from which on its pattern is tried together
with its length."""
LONG_TEXTS = 32
"""The most different combinations of a pattern and a length that are tried."""
_LENGTHS = ("minLength", "maxLength")


def reply_to(request: Request) -> Reply:
    try:
        with time_limit(request.seconds):
            match request:
                case Compile(schema):
                    return _compiled(View(json.loads(schema)))
                case ConvertGbnf(gbnf):
                    return Compiled(_converted(gbnf))
                case CheckValue(value, schema):
                    return CheckedValue(_mistakes(json.loads(value), json.loads(schema)))
    except InvalidGrammar as error:
        return SchemaRefused(error.message)
    except Exception as error:  # a schema that was not checked can cause any
        return SchemaRefused(f"It can't be used: {error}.")


def _mistakes(value: Any, schema: Any) -> list[str]:
    validator = validator_for(schema, default=Draft202012Validator)
    # an empty registry can't fetch anything
    errors = validator(schema, registry=Registry()).iter_errors(value)
    deepest = (best_match([error]) for error in islice(errors, limits.CHECK_ERRORS))
    return sorted({_cut(f"{error.json_path}: {error.message}") for error in deepest if error})


def _cut(text: str) -> str:
    most = limits.FIELD_ERROR_CHARACTERS
    return text if len(text) <= most else f"{text[:most]}…"


def _compiled(view: View) -> Compiled:
    check(view)
    unsupported, overlaps = unsupported_keywords(view), list(_overlapping(view))
    grammar = simplified_text(view, unsupported)
    if why := fault(f"start: %json {grammar}"):
        reason = _reason(view) if UNSATISFIABLE in why else ""
        raise InvalidGrammar(f"The schema can't be used: {why}{reason}.")
    _try_long_texts(view.reached())
    return Compiled(grammar, [*unsupported, *overlaps])


def _overlapping(view: View) -> Iterator[UnsupportedKeyword]:
    """Yields each `oneOf` of which a value may follow two options, as far as types, listed values
    and those of required members show: it means another thing than `anyOf`, as which it is read."""
    for path, schema in {visit.part.path: visit.part for visit in visited(view)}.values():
        if isinstance(schema, Mapping) and "oneOf" in schema:
            parts = (Part((*path, "oneOf", str(n)), one) for n, one in enumerate(schema["oneOf"]))
            options = [_outline(part, view) for part in parts]
            alone = {"oneOf": options, "x-guidance": {**JSON, "coerce_one_of": False}}
            if fault(f"start: %json {json.dumps(alone)}"):
                yield UnsupportedKeyword(
                    path, "oneOf", "has options that may overlap (anyOf takes them)"
                )


def _outline(option: Part, view: View, *, is_member: bool = False) -> Schema:
    """Returns what tells an option from others, without references."""
    if option.schema is False:
        return False
    schemas: list[Schema] = []
    for path, schema in islice(flattened(option, view), MOST_JOINED):
        assert isinstance(schema, Mapping)
        own = {key: schema[key] for key in ("type", "const", "enum", "required") if key in schema}
        listed = properties_in(schema)
        tags = [name for name in required_by(schema) if name in listed and not is_member]
        members = ((name, Part((*path, "properties", name), listed[name])) for name in tags)
        own["properties"] = {name: _outline(each, view, is_member=True) for name, each in members}
        schemas.append(own)
    return {"allOf": schemas} if len(schemas) > 1 else (schemas or [True])[0]


def _reason(view: View) -> str:
    """Returns the path of the first part that no value can meet, and why, in brackets; may be
    empty."""
    root: Any = view.root
    shared = {key: root[key] for key in DEFINITIONS if key in root}
    for path, schema in islice(view.reached(), 1, MOST_TRIED):
        alone = json.dumps(
            {**shared, **schema, "x-guidance": JSON} if isinstance(schema, dict) else schema
        )
        why = fault(f"start: %json {alone}")
        if UNSATISFIABLE in why and " is unsatisfiable" not in why:
            return f" ({pointer(path)}: {why.partition(UNSATISFIABLE)[2]})"
    return ""


def _try_long_texts(parts: Iterable[Part]) -> None:
    """Refuses texts whose pattern and length are too costly together.

    llguidance joins both into one expression, which it builds while the text is read: a row would
    fail at its first characters.
    """
    tried = set[str]()
    for path, schema in parts:
        if isinstance(schema, bool) or "pattern" not in schema:
            continue
        text = {key: schema[key] for key in ("pattern", *_LENGTHS) if key in schema}
        if max(text.get(key, 0) for key in _LENGTHS) < LONG_TEXT:
            continue
        source = f"start: %json {json.dumps({'type': 'string', **text})}"
        if source not in tried and len(tried) < LONG_TEXTS:
            tried.add(source)
            if why := text_fault(source):
                raise refused((*path, "pattern"), f"is too costly for such a length: {why}")


def _converted(gbnf: str) -> str:
    try:
        return gbnf_to_lark(gbnf)
    except Exception as error:  # the converter raises Exception itself
        raise InvalidGrammar(f"The grammar can't be used: {error}.") from None


def main() -> None:
    os.nice(NICENESS)
    end_with_server(int(sys.argv[2]))
    decoder = msgspec.msgpack.Decoder(Request)
    confined = threading.Event()

    def run() -> None:
        confined.wait()
        serve(socket.socket(fileno=0), lambda frame: (reply_to(decoder.decode(frame)), b""))

    schema = '{"oneOf": [{"type": "string"}, {"pattern": "a"}], "maxItems": 1}'
    reply_to(Compile(schema, 60))  # this also imports the modules that are imported late
    reply_to(CheckValue("[1, 2]", schema, 60))
    gc.collect()
    gc.freeze()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    enter_sandbox(int(sys.argv[1]))  # signals are set by the main thread only
    confined.set()
    thread.join()


if __name__ == "__main__":
    main()
