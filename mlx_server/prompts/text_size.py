"""Counts the text in a value of any type; fields added later are counted too."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def texts_of(value: Any) -> Iterator[str]:
    """Every string in the value, including the keys of its mappings."""
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, Mapping):
            pending += found.keys()
            pending += found.values()
        elif isinstance(found, list | tuple | set | frozenset):
            pending += found
        elif is_dataclass(found):
            pending += [getattr(found, field.name) for field in fields(found)]


def characters_of(value: Any) -> int:
    return sum(map(len, texts_of(value)))
