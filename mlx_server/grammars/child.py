"""Compiles schemas and checks values: the program of a warm process, `child.py MEMORY LIFELINE`.

llguidance can't be interrupted, so it runs where the operating system can end it. The threads of
this process have stacks as large as those that compile in the engine, so that both fail alike.
"""

import gc
import json
import math
import os
import re
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
from mlx_server.grammars.grammar import Disjointness, simplified_text, unsupported_keywords
from mlx_server.grammars.patterns import as_rust, written_out
from mlx_server.grammars.view import DEFINITIONS, Part, View, pointer, refused
from mlx_server.sandbox.child import Served, end_with_server, enter_sandbox, serve, time_limit

MOST_STEPS = 32
"""The most parts within each other that are tried, and schemas that are joined to one."""

_UNSATISFIABLE = "Unsatisfiable schema: "
_MEMBER = "required property '"
_MEMBER_END = "' is unsatisfiable"
_ITEM = re.compile(r"required item is unsatisfiable|prefixItems\[(\d+)\] is unsatisfiable")
_DEFINITION = re.compile(r" while processing (#\S*)$")
_EMPTY_TEXT = re.compile(r"Regex is empty: .*", re.DOTALL)


def refusal_of(why: str, view: View) -> InvalidGrammar | None:
    """Returns the error that names the innermost part; None if llguidance refuses the schema for
    another reason. why: its message."""
    if _UNSATISFIABLE not in why:
        return None
    part = Part((), view.root)
    for _ in range(MOST_STEPS):
        if definition := _DEFINITION.search(why):
            why = why[: definition.start()]
            part = view.target(Part((), {"$ref": definition[1]})) or part
        inner = next(_required(why, part, view), None)
        if inner is None:
            break
        part = inner
        inside = _fault_of(part.schema, view.root)
        if _UNSATISFIABLE not in inside:  # it can't be met only together with others
            break
        why = inside
    reason = why.rpartition(_UNSATISFIABLE)[2]
    reason = _EMPTY_TEXT.sub("no text has its pattern, format and length", reason)
    return refused(part.path, f"can't be met by any value: {reason}")


def _required(why: str, part: Part, view: View) -> Iterator[Part]:
    """Yields the schemas of the member or of the item that can't be met."""
    name, is_member, _ = why.partition(_MEMBER)[2].rpartition(_MEMBER_END)
    if is_member:
        steps: tuple[str, ...] = ("properties", name)
    elif item := _ITEM.search(why):
        steps = ("prefixItems", item[1]) if item[1] else ("items",)
    else:
        return
    for joined in _joined(part, view):
        for inner in view.links(joined).used:
            if inner.path[len(joined.path) :] == steps:
                yield inner


def _joined(part: Part, view: View) -> Iterator[Part]:
    """Yields the part, the target of its `$ref` and the schemas of its `allOf`, and theirs in
    turn."""
    waiting = [part]
    for _ in range(MOST_STEPS):
        if not waiting:
            return
        part = waiting.pop()
        yield part
        links = view.links(part)
        waiting += [each for each in links.used if each.path[len(part.path)] == "allOf"]
        waiting += [links.target] if links.target else []


def _fault_of(schema: Any, root: Any) -> str:
    if isinstance(schema, Mapping):
        definitions = {key: root[key] for key in DEFINITIONS if key in root}
        schema = {**schema, **definitions, "x-guidance": {"coerce_one_of": True}}
    return fault(f"start: %json {json.dumps(schema)}", reads_only=True)


EXPRESSIONS = frozenset(
    ("pattern", "patternProperties", "propertyNames", "minLength", "maxLength", "multipleOf")
)
"""Keywords that make regular expressions of any size. Without them a lexer reads names, constants
and llguidance's own expressions: it grows with the schema alone, and the engine can build it."""

SMALL_EXPRESSIONS = 4096
"""The characters of all regular expressions, written out, up to which the engine can build the
lexer too."""

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
                    return _compiled(View(json.loads(schema), schema))
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
    found = unsupported_keywords(view, Disjointness(view).holds)
    grammar = simplified_text(view, found)
    _try(grammar, view)
    return Compiled(grammar, [*found])


def _try(grammar: str, view: View) -> None:
    """Raises InvalidGrammar if llguidance refuses the grammar."""
    expressions = [
        part
        for part in view.reached()
        if isinstance(part.schema, Mapping) and not EXPRESSIONS.isdisjoint(part.schema)
    ]
    is_small = sum(_written_out(part.schema) for part in expressions) <= SMALL_EXPRESSIONS
    if why := fault(f"start: %json {grammar}", reads_only=is_small):
        if unsatisfiable := refusal_of(why, view):
            raise unsatisfiable
        at = _place(why, view)
        raise InvalidGrammar(f"The schema can't be used: {why}{f' ({at})' if at else ''}.")
    _try_long_texts(expressions)


def _written_out(schema: Any) -> float:
    """The characters of the schema's regular expressions, with their repetitions written out."""
    if "multipleOf" in schema:
        return math.inf
    patterns = [schema["pattern"]] if "pattern" in schema else []
    sizes = [written_out(each) for each in (*patterns, *schema.get("patternProperties", ()))]
    length = max(schema.get(key, 1) for key in _LENGTHS)
    return sum(math.inf if isinstance(size, str) else size * length for size in sizes) or length


def _try_long_texts(parts: Iterable[Part]) -> None:
    """Refuses texts whose pattern and length are too costly together.

    llguidance joins both into one expression, which it builds while the text is read: a row would
    fail at its first characters.
    """
    tried = set[str]()
    for path, found in parts:
        if isinstance(found, bool) or "pattern" not in found:
            continue
        text = {key: found[key] for key in ("pattern", *_LENGTHS) if key in found}
        if max(text.get(key, 0) for key in _LENGTHS) < LONG_TEXT:
            continue
        source = f"start: %json {json.dumps({'type': 'string', **text})}"
        if source not in tried and len(tried) < LONG_TEXTS:
            tried.add(source)
            if why := text_fault(source):
                raise refused((*path, "pattern"), f"is too costly for such a length: {why}")


def _place(why: str, view: View) -> str:
    """Returns the path of the keyword or pattern that llguidance's message quotes; may be empty."""
    for path, found in view.reached():
        for key, value in found.items() if isinstance(found, Mapping) else ():
            patterns = [value] if key == "pattern" else value if key == "patternProperties" else ()
            if f"'{key}'" in why or any(
                f"/{pattern}/" in why or f"/{as_rust(pattern)}/" in why for pattern in patterns
            ):
                return pointer((*path, key))
    return ""


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

    def answer(frame: bytearray) -> Served:
        return Served(msgspec.msgpack.encode(reply_to(decoder.decode(frame))))

    def run() -> None:
        confined.wait()
        serve(socket.socket(fileno=0), answer)

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
