"""Other spellings of marks that no keyboard has.

Models and gateways write `<|tool_calls_begin|>` for `<｜tool▁calls▁begin｜>`.
"""

from collections.abc import Iterator
from dataclasses import Field, fields, replace
from itertools import product
from typing import Any, ClassVar, Protocol, TypeVar

BAR, JOINT = "｜", "▁"
BARS, JOINTS = (BAR, "|"), (JOINT, "_", " ", r"\_")


class MarkRecord(Protocol):
    """A frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Marks = TypeVar("Marks", bound=MarkRecord)


def respelled_mark(mark: str) -> tuple[str, ...]:
    """The mark in each other spelling; none, if it is of ordinary characters."""
    found = (mark.replace(BAR, b).replace(JOINT, j) for b, j in product(BARS, JOINTS))
    return tuple(dict.fromkeys(each for each in found if each != mark))


def respelled(record: Marks) -> Iterator[Marks]:
    """The record with all of its texts in each other spelling."""
    seen = [record]
    for bar, joint in product(BARS, JOINTS):
        made = replace(record, **_texts(record, bar, joint))
        if made not in seen:
            seen.append(made)
            yield made


def _texts(record: MarkRecord, bar: str, joint: str) -> dict[str, Any]:
    def spell(text: str) -> str:
        return text.replace(BAR, bar).replace(JOINT, joint)

    found = {field.name: getattr(record, field.name) for field in fields(record)}
    texts = {name: spell(value) for name, value in found.items() if isinstance(value, str)}
    lists = {
        name: tuple(map(spell, value))
        for name, value in found.items()
        if isinstance(value, tuple) and all(isinstance(each, str) for each in value)
    }
    return texts | lists
