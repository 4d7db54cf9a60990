"""The JSON-Schema-Test-Suite through our schemas and llguidance, counted by keyword."""

import gzip
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import formats
from mlx_server.requests import JsonFormat
from tests.grammars.matching import Refused, matcher_of, matches

DATA = Path(__file__).parent / "data" / "draft2020-12.json.gz"


@dataclass
class Count:
    schemas: int = 0
    refused: int = 0
    valid_taken: int = 0
    valid_refused: list[str] = field(default_factory=list)
    invalid_refused: int = 0
    invalid_taken: list[str] = field(default_factory=list)

    @property
    def has_exceptions(self) -> bool:
        return bool(self.refused or self.valid_refused or self.invalid_taken)


def counted(*, strict: bool) -> dict[str, Count]:
    """Refused schemas are not tried; if not strict, reported invalid texts may be taken."""
    files = json.loads(gzip.decompress(DATA.read_bytes()))["files"]
    counts = {name: Count() for name in files}
    for name, cases in files.items():
        for case in cases:
            _add(counts[name], case, strict=strict)
    return counts


def _add(count: Count, case: dict[str, Any], *, strict: bool) -> None:
    count.schemas += 1
    matcher = _matcher(case["schema"], strict=strict)
    if matcher is None:
        count.refused += 1
        return
    reported = formats.unenforced(JsonFormat(case["schema"], strict=strict))
    for test in case["tests"]:
        label = f"{case['description']}: {test['description']}"
        taken = any(matches(matcher, text) for text in spellings(test["data"]))
        if test["valid"] and taken:
            count.valid_taken += 1
        elif test["valid"]:
            count.valid_refused.append(label)
        elif not taken:
            count.invalid_refused += 1
        elif not reported:
            count.invalid_taken.append(label)


def _matcher(schema: Any, *, strict: bool) -> LLMatcher | None:
    wanted = JsonFormat(schema, strict=strict)
    try:
        formats.check(wanted, "response_format")
        return matcher_of(wanted)
    except (InvalidGrammar, Refused):
        return None


def spellings(value: Any) -> Iterator[str]:
    """A value in every order of its members (few of them), and 1.0 also as 1."""
    for found in _ordered(value):
        yield json.dumps(found, ensure_ascii=False)


def _ordered(value: Any) -> Iterator[Any]:
    if isinstance(value, float) and value.is_integer():
        yield int(value)
        yield value
    elif isinstance(value, list):
        yield from map(list, itertools.product(*map(list, map(_ordered, value))))
    elif isinstance(value, dict):
        for keys in itertools.islice(itertools.permutations(value), 120):
            for members in itertools.product(*(list(_ordered(value[key])) for key in keys)):
                yield dict(zip(keys, members, strict=True))
    else:
        yield value


def table(strict: dict[str, Count], loose: dict[str, Count]) -> str:
    """A line for each keyword with exceptions; the last one adds all keywords up."""
    columns = ("refused", "valid", "invalid")
    lines = [("keyword", "schemas", *columns, *(f"not strict: {column}" for column in columns))]
    lines.append(("---", *["---:"] * (len(lines[0]) - 1)))
    for name, count in {**strict, "all": total(strict.values())}.items():
        other = loose.get(name) or total(loose.values())
        if count.has_exceptions or other.has_exceptions:
            lines.append((name, str(count.schemas), *_cells(count), *_cells(other)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def total(counts: Iterable[Count]) -> Count:
    result = Count()
    for count in counts:
        result.schemas += count.schemas
        result.refused += count.refused
        result.valid_taken += count.valid_taken
        result.valid_refused += count.valid_refused
        result.invalid_refused += count.invalid_refused
        result.invalid_taken += count.invalid_taken
    return result


def _cells(count: Count) -> tuple[str, str, str]:
    return (
        str(count.refused),
        _of(count.valid_taken, count.valid_refused),
        _of(count.invalid_refused, count.invalid_taken),
    )


def _of(right: int, wrong: list[str]) -> str:
    return f"{right} of {right + len(wrong)}" if wrong else str(right)
