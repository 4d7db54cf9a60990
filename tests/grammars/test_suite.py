"""The JSON-Schema-Test-Suite: what SUITE.md says is so, and nothing invalid gets through."""

import gzip
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
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


pytestmark = pytest.mark.slow

REPORTED = Path(__file__).parent / "SUITE.md"

SHAPES_ONLY = {"optional/format/date-time", "optional/format/date", "optional/format/time"}
"""No regular expression of a date knows leap years, nor one of a time leap seconds."""
ELSEWHERE_UNDERSTOOD = {
    "format": "an annotation to the suite, a constraint to llguidance and to us",
    "optional/ecmascript-regex": r"\s is Unicode's, and control characters are not written",
    "optional/format/email": "no quoted local parts, no addresses for hosts",
    "optional/format/ipv6": "no IPv4 in the last two groups",
    "vocabulary": "metaschemas are not fetched: their vocabularies are all of 2020-12",
}


def test_nothing_invalid_is_taken_and_nothing_valid_refused_unless_listed() -> None:
    strict, loose = counted(strict=True), counted(strict=False)
    for counts in (strict, loose):
        taken = {name for name, count in counts.items() if count.invalid_taken}
        refused = {name for name, count in counts.items() if count.valid_refused}
        assert taken == SHAPES_ONLY
        assert refused == set(ELSEWHERE_UNDERSTOOD)
    assert table(strict, loose) in REPORTED.read_text(), "python -m tests.grammars.test_suite"


def text() -> str:
    reasons = "\n".join(f"- `{name}`: {why}." for name, why in ELSEWHERE_UNDERSTOOD.items())
    return "\n".join(
        (
            "# JSON-Schema-Test-Suite",
            "",
            "Draft 2020-12, as it comes with jsonschema 4.26.0 (MIT license, inside"
            " `data/draft2020-12.json.gz`), through mlx_server/grammars and llguidance. `refused`"
            " schemas are answered with 400; their texts are not tried. `valid` texts are valid and"
            " taken, `invalid` ones are invalid and not taken. Not strict, an invalid text may be"
            " taken where the answer lists the keyword as not enforced; it is not counted."
            " Keywords without a line are held in every case. Written by"
            " `python -m tests.grammars.test_suite`.",
            "",
            "Valid texts that are not taken:",
            "",
            reasons,
            "",
            "Invalid texts that are taken: dates of a 29 February and leap seconds at a wrong time,"
            " whose formats are checked by shape.",
            "",
            table(counted(strict=True), counted(strict=False)),
            "",
        )
    )


if __name__ == "__main__":
    REPORTED.write_text(text())
