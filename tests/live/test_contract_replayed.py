"""The decode contract on replay models, to the token: what was recorded tells what is exact."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from mlx_server.families import family_named
from mlx_server.sources.replay_checkpoint import built_in_tokenizer
from tests.contract import pairs
from tests.contract.answers import Completion, NotAnswered, asked, stream
from tests.contract.pairs import SAID, SCHEMA, TOOLS
from tests.live import contract_requests
from tests.live.common import Models, common_models, transcript
from tests.live.contract_requests import answered, run
from tests.live.server import LiveServer, eventually
from tests.tables import cases

THINKING = ("qwen3", "gpt_oss", "gemma4")
OTHERS = ("deepseek_v3", "smollm2")
ALIKE = ("qwen3", "gpt_oss", "deepseek_v3", "smollm2")
"""Where calls play no part: reasoning in tokens, in messages and in text, and none."""
THOUGHT = "Let me see, step by step. " * 2
SLOW = "Word by word it comes, and nothing stops it. " * 8
DELAY = 10
LONGEST_GAP = 5.0
"""Seconds between two tokens of a stream, of which others know nothing."""

THOUGHTLESS = "thoughtless"

JSON_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
}


@common_models
def models(folder: Path, _: object) -> Models:
    slow = {"match": "slowly", "output": SLOW, "delay_ms": DELAY}
    for name in (*THINKING, *OTHERS):
        transcript(folder / f"{name}.jsonl", [slow, pairs.entry(name, THOUGHT)])
    replays = {
        f"contract-{name}": {"source": f"replay:{name}.jsonl", "family": name}
        for name in (*THINKING, *OTHERS)
    }
    effort = {"template_kwargs": {"reasoning_effort": "none"}}
    return {**replays, f"contract-{THOUGHTLESS}": {**replays["contract-qwen3"], **effort}}


def body(model: str, text: str = "Well?", **more: Any) -> dict[str, Any]:
    return contract_requests.body(f"contract-{model}", text, **more)


@pytest.mark.parametrize(
    ("model", "format"),
    [*product(THINKING, [None]), ("qwen3", JSON_SCHEMA), ("gpt_oss", JSON_SCHEMA)],
)
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_of_reasoning_is_kept_to_the_token(
    server: LiveServer, model: str, budget: int, format: Any
) -> None:
    asking = body(model, thinking_budget=budget, response_format=format)
    answer, found = answered(server, asking)
    assert found.reasoning_tokens == budget
    assert THOUGHT.startswith(answer.reasoning.strip())
    assert answer.reasoning.strip() or budget < 2
    assert answer.finish == "stop"
    if format:
        jsonschema.validate(json.loads(answer.text), SCHEMA)
    else:
        assert answer.text == SAID


@pytest.mark.parametrize("model", THINKING)
def test_a_budget_that_is_not_used_up_changes_nothing(server: LiveServer, model: str) -> None:
    answered(server, body(model))  # from then on, the prompt cache has the prompt
    free, whole = answered(server, body(model))
    assert (free.text, free.finish) == (SAID, "stop")
    assert free.reasoning.strip() == THOUGHT.strip()
    answer, completion = answered(server, body(model, thinking_budget=1000))
    assert answer == free
    assert without_drafts(completion.usage) == without_drafts(whole.usage)


def without_drafts(usage: Mapping[str, Any]) -> dict[str, Any]:
    """The usage without the drafted tokens: what is drafted depends on what was learnt by then."""
    details = usage["completion_tokens_details"].items()
    kept = {name: count for name, count in details if "prediction" not in name}
    return {**usage, "completion_tokens_details": kept}


@pytest.mark.parametrize("model", [*THINKING, *OTHERS])
@pytest.mark.parametrize(("most", "budget"), [(1, None), (6, 5)])
def test_an_answer_has_as_many_tokens_as_it_may(
    server: LiveServer, model: str, most: int, budget: int | None
) -> None:
    tokenizer = built_in_tokenizer(family_named(model))
    reported = tokenizer.decode(tokenizer.encode(SAID).ids[:most])
    asking = body(model, max_response_tokens=most, thinking_budget=budget)
    answer, _ = answered(server, asking)
    assert (answer.text, answer.finish) == (reported, "length")


@pytest.mark.parametrize("model", [*THINKING, *OTHERS])
def test_each_of_several_answers_continues_the_message(server: LiveServer, model: str) -> None:
    asking = body(model, n=3, guided_choice=pairs.OPTIONS, continue_final_message=True)
    asking["messages"].append({"role": "assistant", "content": "perh"})
    asking["add_generation_prompt"] = False
    found: Completion = run(server, lambda http: asked(http, asking))
    assert [answer.text for answer in found.answers] == ["aps so"] * 3


@pytest.mark.parametrize("model", [*THINKING, *OTHERS])
@pytest.mark.parametrize(
    ("more", "stream"), [({"response_format": JSON_SCHEMA}, False), ({"tools": TOOLS}, True)]
)
def test_what_has_no_room_is_cut_and_no_call(
    server: LiveServer, model: str, more: dict[str, Any], stream: bool
) -> None:
    choice = {"tool_choice": "required"} if "tools" in more else {}
    asking = body(model, thinking_budget=0, stream=stream, **more, **choice)
    answer, found = answered(server, {**asking, "max_tokens": 4})
    assert (answer.finish, found.tokens) == ("length", 4)
    if stream:  # what was shown of a call can't be taken back
        assert not [arguments for _, arguments in answer.calls if _is_json(arguments)]
    else:
        assert not answer.calls
    assert not answer.text or not _is_json(answer.text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("model", "stream"), [*product((*THINKING, *OTHERS), [True]), *product(ALIKE, [False])]
)
def test_what_a_format_spells_is_text(server: LiveServer, model: str, stream: bool) -> None:
    marks = [*family_named(model).special_tokens, "<tool_call>", "</tool_call>", "</think>"]
    spelled = f"So: {' '.join(marks)}."
    asking = body(model, structured_outputs={"choice": [spelled]}, stream=stream, thinking_budget=3)
    answer, _ = answered(server, {**asking, "max_tokens": 3000})
    assert answer.text.strip() == spelled
    assert not answer.calls


@pytest.mark.parametrize("model", ["qwen3", "gpt_oss", "smollm2"])
def test_bias_and_penalties_choose_among_what_a_grammar_allows(
    server: LiveServer, model: str
) -> None:
    pattern = {"regex": "[A-Z] [A-Z] [A-Z] [A-Z]"}
    letters: dict[str, Any] = {"structured_outputs": pattern, "thinking_budget": 0}
    tokenizer = built_in_tokenizer(family_named(model))
    plain, _ = answered(server, body(model, **letters))
    first = plain.text[0]
    biased = {
        str(id): -100
        for token, id in tokenizer.get_vocab().items()
        if token in (first, "Ġ" + first)
    }
    other, _ = answered(server, body(model, **letters, logit_bias=biased))
    assert first not in other.text
    for penalty in ("presence_penalty", "frequency_penalty"):
        varied, _ = answered(server, {**body(model, **letters), penalty: 2})
        assert len(set(varied.text) - {" "}) == 4


@asynccontextmanager
async def beside(http: httpx.AsyncClient) -> AsyncIterator[None]:
    """A stream that goes on meanwhile, as if it were alone."""
    times: list[float] = []
    begun = asyncio.Event()

    async def follow() -> str:
        text = ""
        async for chunk in stream(http, body("smollm2", "slowly", max_tokens=600)):
            times.append(time.monotonic())
            text += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
            if text:
                begun.set()
        return text

    following = asyncio.create_task(follow())
    await begun.wait()
    yield
    assert await following == SLOW
    assert max(b - a for a, b in pairwise(times)) < LONGEST_GAP


def _format(schema: Any) -> dict[str, Any]:
    wanted = {"name": "a", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": wanted}


LABORIOUS: list[dict[str, Any]] = [
    {"response_format": _format({"type": "array", "minItems": 9_999, "items": {"minimum": 3}})},
    {"response_format": _format({"enum": [f"value {n}" for n in range(9_999)]})},
    {"response_format": _format({"type": "string", "minLength": 9_000, "maxLength": 9_001})},
    {"structured_outputs": {"regex": "(a|b)*a(a|b){12}"}},
    {"structured_outputs": {"regex": "([a-z]{3}[0-9]{2}-){500}"}},
    {"structured_outputs": {"grammar": 'start: a\na: "(" a ")" | a a | "x"'}},
]


@pytest.mark.alone
def test_laborious_grammars_hold_nobody_up(server: LiveServer) -> None:
    """They are kept to, refused, or end alone."""

    async def ask(http: httpx.AsyncClient) -> list[BaseException | Completion]:
        async with beside(http):
            asking = [
                asked(http, body("qwen3", thinking_budget=0, seed=1, **{**more, "max_tokens": 60}))
                for more in LABORIOUS
            ]
            return await asyncio.gather(*asking, return_exceptions=True)

    for more, found in zip(LABORIOUS, run(server, ask), strict=True):
        assert isinstance(found, Completion | NotAnswered), more
        if isinstance(found, Completion):
            assert found.answers[0].finish in ("stop", "length")
        else:
            assert found.status in (400, 503), (more, found)
    eventually(server.idle, "their rows are free")


@cases
def test_who_owns_a_model_may_forbid_it_to_think_unless_asked(
    server: LiveServer, more: dict[str, Any], thinks: bool
) -> None:
    answer, found = answered(server, body(THOUGHTLESS, **more))
    assert (bool(answer.reasoning), bool(found.reasoning_tokens)) == (thinks, thinks)
    assert answer.text == SAID
