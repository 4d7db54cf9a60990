"""Reads a whole JSON object or array where that is needed: where delimiters end values and its
strings may contain these, or where only the whole shows what it is."""

import json

from mlx_server import limits
from mlx_server.repair.model_json import bounded
from mlx_server.tool_parsers.source import Source, Steps


def read_json(source: Source) -> Steps[str]:
    """Reads white space and the object or array that comes next, and returns their text. What is
    not JSON stays to be read, and so does white space before it, which may belong to a
    delimiter."""
    if not (yield from source.after_space("{", "[")):
        return ""
    space = yield from source.space()
    size = yield from _size(source)
    try:
        json.loads(bounded(source.ahead()[:size]))
    except (ValueError, RecursionError):
        return space
    return space + source.take(size)


def json_ahead(source: Source) -> Steps[str]:
    """Reads white space, and returns the text of the object or array after it, which stays to be
    read; empty if there is none."""
    yield from source.space()
    if not (yield from source.comes("{", "[")):
        return ""
    size = yield from _size(source)
    return source.ahead()[:size]


def _size(source: Source) -> Steps[int]:
    """Returns the length of the object or array, by its brackets; 0 if it has no end."""
    size, depth, in_string, escaped = 0, 0, False, False
    while size <= limits.READ_JSON_CHARACTERS:
        for character in source.ahead(size):
            size += 1
            if escaped or (in_string and character not in '"\\'):
                escaped = False
            elif character == "\\":
                escaped = in_string
            elif character == '"':
                in_string = not in_string
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
                if not depth:
                    return size
        if source.closed:
            break
        yield
    return 0
