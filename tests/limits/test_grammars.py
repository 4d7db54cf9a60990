"""Schemas, patterns and grammars: what is at a limit passes, one more does not."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_server import limits
from mlx_server.engine.messages import Generate, Thinking
from mlx_server.requests import SamplingParams
from mlx_server.schemas import patterns
from mlx_server.schemas.check import check, measure
from mlx_server.schemas.compiler import in_a_line
from mlx_server.schemas.disjoint import Disjointness
from mlx_server.schemas.report import unsupported_keywords
from mlx_server.schemas.variants import variants_of
from mlx_server.schemas.view import Part, View
from mlx_server.worker.batch import Batch
from mlx_server.worker.row_validation import check_row
from tests.limits.boundaries import Boundary, passes

Json = dict[str, Any]


def nodes(count: int) -> None:
    measure({"default": [[]] * (count - 2)})


def multiples(digits: int) -> None:
    half = digits // 2 - 1  # zeros at the end of a number cost nothing
    properties = {"a": {"multipleOf": half}, "b": {"multipleOf": digits - half}}
    check(View({"properties": properties}))


def joined_patterns(count: int) -> bool:
    return not unsupported_keywords(View({"allOf": [{"pattern": "a"}] * count}))


def counted(properties: int) -> Json:
    return {
        "type": "object",
        "properties": {str(at): {} for at in range(properties)},
        "minProperties": 1,
    }


def choices(count: int) -> bool:
    root = math.isqrt(count)
    others = [counted(1) for _ in range(count - root * root)]
    found = unsupported_keywords(View({"items": counted(root), "prefixItems": others}))
    return not any("too costly" in gap.why for gap in found)


def disjoint_depth(levels: int) -> bool:
    one: Json = {"const": 1}
    other: Json = {"const": 2}
    for _ in range(levels - 1):
        one, other = (
            {"type": "object", "required": ["a"], "properties": {"a": inner}}
            for inner in (one, other)
        )
    options = [Part(("oneOf", "0"), one), Part(("oneOf", "1"), other)]
    return Disjointness(View({})).holds(options)


def comparisons(count: int) -> bool:
    values = {"enum": [str(at) for at in range(count - 2)]}  # two schemas and their values
    options = [Part(("oneOf", "0"), values), Part(("oneOf", "1"), {"type": "null"})]
    return Disjointness(View({})).holds(options)


def variants(count: int) -> bool:
    return len(variants_of({"type": "object", "anyOf": [{"type": "object"}] * count})) == count


def variant_members(count: int) -> bool:
    names = math.ceil(count / 10) - 1
    schema = {
        "type": "object",
        "properties": {str(at): {} for at in range(names)},
        "anyOf": [{"type": "object"}] * 10,
    }
    return len(variants_of(schema)) == 10


def pattern_states(count: int) -> bool:
    times = limits.PATTERN_REPEATS.value
    return not patterns.excessive_part(f"x{{{times}}}" * (count // times) + "x" * (count % times))


def row(**more: Any) -> None:
    batch = SimpleNamespace(vocabulary=10, plays=False, encodes=False)
    command = Generate(1, "m", [1], 1, [], SamplingParams(), **more)
    check_row(command, cast(Batch, batch))


def whole_grammar(characters: int) -> None:
    row(grammar="x" * characters)


def thinking(end: int = 1, closes: Sequence[int] = ()) -> None:
    marks = [b"x" * size for size in closes]
    row(thinking=Thinking(budget=1, inside=True, opens=[], closes=marks, end=[1] * end))


def marks(count: int) -> None:
    thinking(closes=[1] * count)


def mark_size(count: int) -> None:
    thinking(closes=[count])


def end_tokens(count: int) -> None:
    thinking(end=count)


def compiler_says(characters: int) -> bool:
    text = "x" * characters
    return in_a_line(text) == text


@pytest.mark.parametrize(
    "case",
    [
        Boundary("SCHEMA_NODES", passes(nodes)),
        Boundary("SCHEMA_MULTIPLES", passes(multiples)),
        Boundary("SCHEMA_JOINED_PATTERNS", joined_patterns),
        Boundary("SCHEMA_CHOICES", choices),
        Boundary("SCHEMA_DISJOINT_DEPTH", disjoint_depth),
        Boundary("SCHEMA_COMPARISONS", comparisons),
        Boundary("SCHEMA_VARIANTS", variants),
        Boundary("SCHEMA_VARIANT_MEMBERS", variant_members),
        Boundary("PATTERN_STATES", pattern_states),
        Boundary("WHOLE_GRAMMAR_CHARACTERS", passes(whole_grammar)),
        Boundary("REASONING_DELIMITERS", passes(marks)),
        Boundary("REASONING_DELIMITER_TOKENS", passes(mark_size)),
        Boundary("REASONING_DELIMITER_TOKENS", passes(end_tokens)),
        Boundary("GRAMMAR_ERROR_CHARACTERS", compiler_says),
    ],
    ids=str,
)
def test_one_past_it(case: Boundary, monkeypatch: pytest.MonkeyPatch) -> None:
    case.check(monkeypatch)
