"""Random walks under the mask of random schemas end in JSON that the schema allows."""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import formats
from mlx_server.requests import JsonFormat
from tests.grammars.matching import END, Refused, allowed, matcher_of

LONGEST = 3_000

names = st.sampled_from(["a", "b", "c", "a_1", "é", "with space", 'quo"te', "back\\slash"])
scalars = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(
        lambda kind, low, size: {"type": kind, "minimum": low, "maximum": low + size},
        st.sampled_from(["integer", "number"]),
        st.integers(-1000, 1000),
        st.integers(0, 500),
    ),
    st.builds(lambda of: {"type": "integer", "multipleOf": of}, st.integers(1, 20)),
    st.builds(
        lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
        st.integers(0, 4),
        st.integers(0, 4),
    ),
    st.builds(
        lambda pattern: {"type": "string", "pattern": pattern},
        st.sampled_from(["^[a-c]{1,4}$", "^a", r"^\d{2}-\w$", "^(x|yz)+$", "^(é|x)"]),
    ),
    st.builds(
        lambda name: {"type": "string", "format": name},
        st.sampled_from(["uuid", "ipv4", "duration"]),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.none(), st.booleans(), st.integers(-9, 9), names), min_size=1),
    ),
)


def _object(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda members, required, rest: {
            "type": "object",
            "properties": members,
            "required": [name for name in members if name in required],
            "additionalProperties": rest,
        },
        st.dictionaries(names, inner, max_size=4),
        st.sets(names),
        st.one_of(st.booleans(), inner),
    )


def _array(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda first, items, low, size: {
            **({"prefixItems": first} if first else {}),
            "type": "array",
            "items": items,
            "minItems": low,
            "maxItems": low + size,
        },
        st.lists(inner, max_size=2),
        inner,
        st.integers(0, 3),
        st.integers(0, 3),
    )


def _combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda key, options: {key: options},
        st.sampled_from(["anyOf", "oneOf", "allOf"]),
        st.lists(inner, min_size=1, max_size=3),
    )


def _recursive(inner: Any) -> Any:
    """Refers to itself in an optional member."""
    tree = {"type": "object", "properties": {"v": inner, "more": {"$ref": "#/$defs/tree"}}}
    return {"$ref": "#/$defs/tree", "$defs": {"tree": tree}}


schemas = st.recursive(
    scalars, lambda inner: st.one_of(_object(inner), _array(inner), _combined(inner)), max_leaves=8
)
schemas = st.one_of(schemas, st.builds(_recursive, scalars))


@pytest.mark.slow
@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(schemas, st.integers(0, 2**32))
def test_a_walk_under_the_mask_ends_in_what_the_schema_allows(schema: Any, seed: int) -> None:
    wanted = JsonFormat(schema)
    try:
        formats.check(wanted, "response_format")
        matcher = matcher_of(wanted)
    except (InvalidGrammar, Refused):
        return  # by name, and nothing began
    text = walk(matcher, random.Random(seed))
    jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    ).validate(json.loads(text))


def walk(matcher: LLMatcher, chance: random.Random) -> str:
    """Ends as soon as it may; what closes something is preferred, the longer the more."""
    taken = bytearray()
    while True:
        tokens = allowed(matcher)
        if END in tokens or not tokens:
            break
        closing = [token for token in tokens if token in b'"}]']
        likely = closing if closing and chance.random() < 0.3 + len(taken) / 300 else tokens
        token = chance.choice(likely)
        taken.append(token)
        assert matcher.consume_token(token), matcher.get_error()
        assert len(taken) < LONGEST, bytes(taken)
    assert matcher.is_accepting(), bytes(taken)
    return taken.decode()


@pytest.mark.parametrize("seed", range(20))
def test_a_walk_without_a_schema_is_json(seed: int) -> None:
    assert isinstance(json.loads(walk(matcher_of(JsonFormat()), random.Random(seed))), dict)
