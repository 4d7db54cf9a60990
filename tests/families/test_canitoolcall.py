"""The golden cases of CanIToolCall (PyPI), through our own parsers, cut in many ways.

A fixture is what a real model's template or an engine's tests hold as that model's raw output,
with the one right reading of it. Ours see it as the engine would give it: every control token of
the family as one token, the text between them in tokens of any size.
"""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import tokenizers
from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Fixture, load_fixtures
from canitoolcall.pytest_plugin import family_for
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status

from mlx_server.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.families import family_named
from mlx_server.messages import Tool
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.requests import ALL_REPAIRS, RepairPolicy

FAMILY_OF = {
    "qwen3-xml": "qwen3_5",
    "glm": "glm4_5",
    "gpt-oss": "gpt_oss",
    "x-deepseek-v3": "deepseek_v3",
    "x-deepseek-v31": "deepseek_v3",
    "x-deepseek-v32": "deepseek_v32",
    "x-deepseek-v4": "deepseek_v32",
    "x-deepseek-v41": "deepseek_v32",
    "gemma4": "gemma4",
    "x-kimi-k2": "kimi_k2",
    "x-kimi-k3": "kimi_k3",
    "qwen3-hermes": "qwen3",
    "x-llama-json": "llama3",
    "x-llama-pythonic": "llama4",
    "mistral": "mistral",
}
"""Ours, by the suite's; where a suite's family has several formats, by a tag of the fixture."""

MISSES: dict[str, str] = {
    "llama/l4-truncated-missing-close-bracket": (
        "Of two calls in a list the first is whole: it counts, as in every other notation, where "
        "the suite too expects it."
    ),
    "gemma4/vllm-text-before-call": "the space before the call is the text's, as in both of "
    "the suite's sglang-text-*, which keep it",
    "gpt-oss/harmony-final-json-lookalike": (
        "JSON that is the whole final message, names a tool of the request and fits its schema is "
        "a call in the wrong place, as models write it: `repair: {mistakes: false}` leaves it."
    ),
}
"""Fixtures that we read differently, and why. One that starts to pass fails here."""

WRITTEN_AS_TEXT = {"kimi/k3-control-marker-text-in-value": "<|close|>argument<|sep|> is how"}
"""What spells control tokens in a fixture's output and is none, as its token ids show."""


def our_family(fixture: Fixture) -> str | None:
    names = [fixture.family, *fixture.tags]
    return next((FAMILY_OF[name] for name in names if name in FAMILY_OF), None)


def units(text: str, control: dict[str, int], seed: int) -> Iterator[tuple[int, str]]:
    """Tokens: control tokens are one each, text is cut as `seed` says; 0: into characters."""
    pieces = random.Random(seed)
    at = 0
    while at < len(text):
        mark = max((m for m in control if text.startswith(m, at)), key=len, default="")
        if mark:
            yield control[mark], ""
            at += len(mark)
            continue
        size = pieces.randint(1, seed * 4) if seed else 1
        ends = [found for m in control if (found := text.find(m, at)) >= 0]
        end = min([at + size, len(text), *ends])
        yield -1, text[at:end]
        at = end


@cache
def replay_tokenizer(family: str) -> tokenizers.Tokenizer | None:
    return family_named(family).replay_tokenizer()


def output_units(fixture: Fixture, control: dict[str, int], seed: int) -> Iterator[tuple[int, str]]:
    if real := replay_tokenizer(our_family(fixture) or ""):  # its ids are the fixture's, uncuttable
        yield from ((id, real.decode([id])) for id in fixture.output_token_ids or ())
        return
    plain = WRITTEN_AS_TEXT.get(fixture.id)
    before, plain, after = (
        fixture.raw_output.partition(plain) if plain else (fixture.raw_output, "", "")
    )
    yield from units(before, control, seed)
    yield from units(plain, {}, seed)
    yield from units(after, control, seed)


def parse(
    fixture: Fixture, seed: int, repair: RepairPolicy = ALL_REPAIRS, *, held: bool = False
) -> ParseResult:
    """held: whether calls are reported once they are complete, as without a grammar."""
    name = our_family(fixture)
    assert name
    family = family_named(name)
    control = {token: number for number, token in enumerate(family.special_tokens)}
    tools = tuple(_tool(tool.get("function", tool)) for tool in fixture.tools)
    parser = family.make_parser(
        ParseContext(
            tools=tools,
            ends_with=_prompt_end(fixture),
            control={number: token for token, number in control.items()},
            repair=repair,
            holds_calls=held,
        )
    )
    events: list[Event] = []
    for token, text in output_units(fixture, control, seed):
        events += parser.feed(token, text)
    events += parser.finish(cut="truncated" in fixture.tags)
    return result(events)


def _tool(function: Any) -> Tool:
    return Tool(function["name"], function.get("description"), function.get("parameters") or {})


def _prompt_end(fixture: Fixture) -> str:
    if fixture.generation_prompt is not None:
        return fixture.generation_prompt
    family = family_for(fixture)
    models = family.reference_models if family else ()
    found = next((m for m in models if m.repo == fixture.models[0]), None)
    return (found.default_generation_prompt if found else None) or ""


def result(events: list[Event]) -> ParseResult:
    """As a client that heeds the end of a call sees it."""
    content = "".join(e.text for e in events if isinstance(e, TextDelta))
    reasoning = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    finished = {e.call for e in events if isinstance(e, ToolCallFinished)}
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolCallDelta):
            arguments[event.call] = arguments.get(event.call, "") + event.arguments
    calls = [
        ParsedToolCall(e.name, arguments[e.call])
        for e in events
        if isinstance(e, ToolCallStarted) and e.call in finished
    ]
    return ParseResult(content or None, reasoning or None, tuple(calls))


FIXTURES = [fixture for fixture in load_fixtures() if our_family(fixture)]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({str(our_family(fixture)) for fixture in FIXTURES}))
def test_every_golden_case(family: str) -> None:
    wrong: dict[str, list[Any]] = {}
    fixtures = [fixture for fixture in FIXTURES if our_family(fixture) == family]
    for fixture in fixtures:
        whole = parse(fixture, 1000, held=True)
        cut = {f"rand:{seed}:8": parse(fixture, seed, held=seed % 2 > 0) for seed in range(8)}
        rows = run_checks(fixture, family_for(fixture), Observation(nonstream=whole, streams=cut))
        if case_status(rows) != Status.PASS:
            failed = (row for row in rows if row.status != Status.PASS)
            wrong[fixture.id] = [(row.check, row.strategy, row.detail) for row in failed]
    missed = {fixture.id for fixture in fixtures} & MISSES.keys()
    assert wrong.keys() == missed, {id: why for id, why in wrong.items() if id not in missed}


def test_json_in_a_final_message_is_text_if_mistakes_are_left() -> None:
    as_written = RepairPolicy(mistakes=False)
    fixture = next(each for each in FIXTURES if each.id == "gpt-oss/harmony-final-json-lookalike")
    cut = {f"rand:{seed}:8": parse(fixture, seed, as_written) for seed in range(4)}
    whole = parse(fixture, 1000, as_written)
    rows = run_checks(fixture, family_for(fixture), Observation(nonstream=whole, streams=cut))
    assert case_status(rows) == Status.PASS, [row.detail for row in rows]
