"""Whatever a grammar asks for, tokens are found that lead to its end."""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_server.grammars.lark import Lark
from mlx_server.worker.constrained_decoding.completion_proposals import proposals_of
from mlx_server.worker.constrained_decoding.ending_search import EndingSearch
from mlx_server.worker.constrained_decoding.grammar_completion import STEP_WORK
from mlx_server.worker.constrained_decoding.matcher_probe import Probe
from tests.worker.constrained_decoding.worlds import (
    SCHEMAS,
    WIDE,
    WISHES,
    World,
    comes_to_its_end,
    completion_hints,
    half,
    json_of,
    obj,
)

pytestmark = pytest.mark.tables


@pytest.mark.parametrize(("name", "wish"), half(SCHEMAS, list(WISHES)))
def test_json_comes_to_its_end(demo: World, name: str, wish: str) -> None:
    schema = SCHEMAS[name]
    comes_to_its_end(
        demo, json_of(schema), wish, lambda text: jsonschema.validate(json.loads(text), schema)
    )


@pytest.mark.parametrize(("name", "wish"), half(SCHEMAS, ["opening", "anything", "text"]))
def test_with_a_token_for_each_byte(bytewise: World, name: str, wish: str) -> None:
    schema = SCHEMAS[name]
    comes_to_its_end(
        bytewise, json_of(schema), wish, lambda text: jsonschema.validate(json.loads(text), schema)
    )


def after_a_control_token(lark: Lark) -> str:
    return f"{lark.up_to('<|answer|>')} {lark.json(SCHEMAS['simple'])}"


def after_a_text_mark(lark: Lark) -> str:
    return f"{lark.up_to('</think>')} {lark.json(SCHEMAS['simple'])}"


def tagged_call(lark: Lark) -> str:
    return (
        r'"<tool_call>\n<function=walk>\n<parameter=to>\n" '
        + lark.up_to("</parameter>")
        + r' "\n<parameter=how>\n" '
        + lark.up_to("</parameter>")
        + r' "\n</function>\n</tool_call>"'
    )


def python_call(lark: Lark) -> str:
    text = lark.terminal(r"/'([^'\\\n]|\\['\\n])*'/")
    return f'"[walk(to=" {text} ", steps=" /[0-9]+/ (", then=" {text})? ")]"'


GRAMMARS: dict[str, tuple[Callable[[Lark], str], str]] = {
    "after a control token": (after_a_control_token, r'.*\{.*"name".*\}\s*'),
    "after a text mark": (after_a_text_mark, r'.*</think>\s*\{.*"name".*\}\s*'),
    "tags": (tagged_call, r"<tool_call>.*</parameter>\n<parameter=how>.*</function>\n</tool_call>"),
    "python": (python_call, r"\[walk\(to='.*', steps=[0-9]+.*\)\]"),
    "regex": (lambda lark: "/a(b|cd{40})*(xy|z{60})/", r"a(b|cd{40})*(xy|z{60})"),
    "choice": (lambda lark: '"yes" | "no" | "perhaps not at all"', "yes|no|perhaps not at all"),
    "a call or text": (
        lambda lark: f"/[a-z ]*/ | {lark.text('<|call|>')} {lark.json(SCHEMAS['nested'])}",
        r"[a-z ]*|\{.*\}\s*",
    ),
}


TEXTUAL = [name for name in GRAMMARS if name not in ("after a control token", "a call or text")]


@pytest.mark.parametrize(("name", "wish"), half(GRAMMARS, list(WISHES)))
def test_other_grammars_come_to_their_end(bytewise: World, name: str, wish: str) -> None:
    start, whole = GRAMMARS[name]
    lark = Lark(bytewise.control)
    pattern = re.compile(whole.encode(), re.DOTALL)

    def check(text: bytes) -> None:
        assert pattern.fullmatch(text)

    comes_to_its_end(bytewise, lark.source(start(lark)), wish, check)


@pytest.mark.parametrize(("name", "wish"), half(TEXTUAL, list(WISHES)[::-1]))
def test_other_grammars_in_long_tokens(demo: World, name: str, wish: str) -> None:
    start, whole = GRAMMARS[name]
    lark = Lark(demo.control)
    pattern = re.compile(whole.encode(), re.DOTALL)

    def check(text: bytes) -> None:
        assert pattern.fullmatch(text)

    comes_to_its_end(demo, lark.source(start(lark)), wish, check)


def test_lines_within_json_are_ended(bytewise: World) -> None:
    """Their end is two characters among many, which nothing but a hint would find."""
    text = {"type": "string", "pattern": r"^begin\n(?:\+.*\n)+end$"}
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    lark = Lark()
    grammar = lark.source(lark.json({**schema, "additionalProperties": False}))
    found = completion_hints(bytewise.pieces, bytewise.matcher(grammar), grammar).tokens
    assert found is not None
    written = json.loads(b"".join(bytewise.text[token] for token in found))
    assert re.fullmatch(r"begin\n(\+.*\n)+end", written["input"])


@pytest.mark.parametrize(("text", "is_costly"), [(b'{"m1":-3', True), (b'{"m1":"q', False)])
def test_after_a_digit_in_a_wide_object_few_ends_are_tried(
    demo: World, text: bytes, is_costly: bool
) -> None:
    """There each costs as much as the object has members, and others have to be tried too."""
    grammar = json_of(WIDE)
    proposals = proposals_of(grammar, demo.pieces)
    probe, search = (
        Probe(demo.matcher(grammar), demo.pieces, proposals.width),
        EndingSearch(demo.pieces, proposals),
    )
    probe.take(demo.pieces.cut(text))
    assert probe.is_costly is is_costly
    known = demo.pieces.cut(b',"m2":0' * 20 + b"}")
    tails = search._tails(known, 1, is_costly=probe.is_costly)
    assert [*known, demo.pieces.stop] in tails
    assert (len(tails) * len(WIDE["properties"]) > 2 * STEP_WORK) is not is_costly


@pytest.mark.parametrize(
    ("text", "known", "ending"),
    [
        (b'{"a":"",', b'"}', b'"":""}'),
        (b'{"a":[{"na', b'""]}', b'":""}]}'),
        (b'{"a":{"name"', b"{}}", b':""}}'),
    ],
)
def test_a_member_of_any_name_is_ended_without_a_search(
    demo: World, text: bytes, known: bytes, ending: bytes
) -> None:
    probe = Probe(demo.matcher(json_of({"type": "object"})), demo.pieces)
    probe.take(demo.pieces.cut(text))
    probe.allow(100)
    search = EndingSearch(demo.pieces, proposals_of("", demo.pieces))
    found = search.find(probe, demo.pieces.cut(known), 100)
    assert found is not None
    assert b"".join(demo.text[token] for token in found) == ending


def test_texts_that_are_refused_unasked_are_not_free(demo: World) -> None:
    """A grammar proposes thousands, and to go through them takes milliseconds."""
    probe = Probe(demo.matcher(json_of({"type": "string"})), demo.pieces)
    probe.allow(100)
    search = EndingSearch(demo.pieces, proposals_of("", demo.pieces))
    assert not [*search._fitting(probe, [demo.pieces.cut(b"{")] * 10_000)]
    assert not probe.left


EVERYDAY = (
    r"^[^@]+@[^@]+\.[^@]+$",
    "(foo|bar)",
    r"\d+\.\d+\.\d+",
    r"^\d{4}-\d{2}-\d{2}$",
    "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    ".*foo.*",
    r"^https?://[^\s/]+/.*$",
    r"^\+?[0-9 ()-]{7,20}$",
    "^(red|green|blue)( (red|green|blue))*$",
    r"^#[0-9a-fA-F]{6}$",
    r"^[\w.-]+@[\w-]+\.\w{2,4}$",
)


@pytest.mark.parametrize("pattern", EVERYDAY)
@pytest.mark.parametrize("wish", ["anything", "text"])
def test_everyday_patterns_come_to_their_end(
    demo: World, bytewise: World, pattern: str, wish: str
) -> None:
    schema = obj(v={"type": "string", "pattern": pattern})
    for world in (demo, bytewise):
        comes_to_its_end(
            world, json_of(schema), wish, lambda text: jsonschema.validate(json.loads(text), schema)
        )


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "name", "na", "items", "x y", "é"])
    members = st.dictionaries(names, inner, max_size=4)
    return members.flatmap(
        lambda listed: st.lists(st.sampled_from([*listed, "name"]), unique=True, max_size=3).map(
            lambda required: obj([name for name in required if name in listed], **listed)
        )
    )


_LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(EVERYDAY).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(["date", "date-time", "uuid", "email", "ipv4", "uri"]).map(
        lambda format: {"type": "string", "format": format}
    ),
    st.integers(0, 40).map(lambda least: {"type": "string", "minLength": least}),
    st.tuples(st.integers(-2000, 2000), st.integers(0, 3000)).map(
        lambda bounds: {"type": "integer", "minimum": bounds[0], "maximum": sum(bounds)}
    ),
    st.integers(-5, 5).map(lambda low: {"type": "number", "exclusiveMinimum": low}),
    st.sampled_from([{"enum": ["low", "lower", 3, None]}, {"type": "boolean"}, {"const": "x"}]),
)
RANDOM_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        st.tuples(inner, st.integers(0, 4)).map(
            lambda parts: {"type": "array", "items": parts[0], "minItems": parts[1]}
        ),
        st.lists(inner, min_size=2, max_size=3).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=6,
)


@pytest.mark.soak
@given(RANDOM_SCHEMAS, st.sampled_from(list(WISHES)), st.booleans())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_no_random_schema_is_cut(
    demo: World, bytewise: World, schema: Any, wish: str, single_bytes: bool
) -> None:
    """With room for the shortest instance and a quarter more, or 8 tokens."""
    comes_to_its_end(
        bytewise if single_bytes else demo,
        json_of(schema),
        wish,
        lambda text: jsonschema.validate(json.loads(text), schema),
    )
