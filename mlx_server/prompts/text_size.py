"""Counts the text in a value of any type; fields added later are counted too, unless they are
marked as `repeated`."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

WINDOW = 1 << 16
"""Characters that are copied at a time."""


def texts_of(value: Any) -> Iterator[str]:
    """Yields every string in the value, including the keys of its mappings."""
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, _COLLECTIONS):
            pending += found
        elif names := _field_names(type(found)):
            pending += [getattr(found, name) for name in names]
        elif found is not None and isinstance(found, Mapping):
            pending += found.keys()
            pending += found.values()


_COLLECTIONS = (list, tuple, set, frozenset)


_names: dict[type, tuple[str, ...]] = {}


def _field_names(kind: type) -> tuple[str, ...]:
    """Returns the fields of a dataclass, which are looked up once; nothing for other types."""
    if kind not in _names:
        own = fields(kind) if is_dataclass(kind) else ()
        _names[kind] = tuple(field.name for field in own if not field.metadata.get("repeated"))
    return _names[kind]


def characters_of(value: Any) -> int:
    return sum(map(len, texts_of(value)))


def memory_of(value: Any) -> int:
    """Returns the bytes that the characters of all texts take in memory: one emoji makes each
    character of its text take four."""
    return sum(len(text) * _width(text) for text in texts_of(value))


def _width(text: str) -> int:
    """Returns the bytes of a character: 1, 2 or 4."""
    if text.isascii():
        return 1
    pieces = (text[begin : begin + WINDOW] for begin in range(0, len(text), WINDOW))
    return max(_bytes_of(piece) // len(piece) for piece in pieces)


def _bytes_of(piece: str) -> int:
    """Returns the bytes of a new string; other strings may keep their UTF-8, which counts in their
    size."""
    return sys.getsizeof(piece * 3) - sys.getsizeof(piece * 2)
