"""How much text a value has, whatever it is made of: text in fields that are yet to come counts."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def texts_of(value: Any) -> Iterator[str]:
    """Every text in it, the keys of its objects included."""
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, Mapping):
            left += found.keys()
            left += found.values()
        elif isinstance(found, list | tuple | set | frozenset):
            left += found
        elif is_dataclass(found):
            left += [getattr(found, field.name) for field in fields(found)]


def characters_of(value: Any) -> int:
    return sum(map(len, texts_of(value)))
