"""Other spellings of delimiters that no keyboard has.

Models and gateways write `<|tool_calls_begin|>` for `<｜tool▁calls▁begin｜>`.
"""

from collections.abc import Iterator
from dataclasses import Field, fields, replace
from itertools import product
from typing import Any, ClassVar, Protocol, TypeVar

BAR, JOINT = "｜", "▁"
BARS, JOINTS = (BAR, "|"), (JOINT, "_", " ", r"\_")


class DelimiterRecord(Protocol):
    """A frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Delimiters = TypeVar("Delimiters", bound=DelimiterRecord)


def respelled_delimiter(delimiter: str) -> tuple[str, ...]:
    """Returns the delimiter in each other spelling; nothing for one of ordinary characters."""
    found = (delimiter.replace(BAR, b).replace(JOINT, j) for b, j in product(BARS, JOINTS))
    return tuple(dict.fromkeys(each for each in found if each != delimiter))


def respelled(record: Delimiters) -> Iterator[Delimiters]:
    """Yields the record with all of its texts in each other spelling."""
    seen = [record]
    for bar, joint in product(BARS, JOINTS):
        made = replace(record, **_respelled_fields(record, bar, joint))
        if made not in seen:
            seen.append(made)
            yield made


def _respelled_fields(record: DelimiterRecord, bar: str, joint: str) -> dict[str, Any]:
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
