"""The server as OpenAI's own client sees it. What need not be true, the shallow model says."""

from contextlib import ExitStack, closing
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.live.chats import (
    COUNT,
    ENDLESS,
    STORY,
    answered,
    ask,
    ask_streaming,
    logprobs_of,
    text_of,
)
from tests.live.server import DEMO, SHALLOW, TINY


def test_it_knows_the_capital_of_france(client: OpenAI) -> None:
    found = ask(client)
    assert "Paris" in text_of(found)
    assert found.choices[0].finish_reason == "stop"


# Several answers, seeds


def four(client: OpenAI, model: str) -> list[str]:
    found = ask(client, model=model, messages=STORY, n=4, seed=7, temperature=1.0, max_tokens=12)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in found.choices} <= {"length", "stop"}
    return [choice.message.content or "" for choice in found.choices]


@pytest.mark.parametrize("model", [DEMO, TINY])
def test_four_answers_to_one_seed(client: OpenAI, model: str) -> None:
    answers = four(client, model)
    assert len(set(answers)) == 4
    assert four(client, model) == answers


def test_and_the_same_four_while_others_are_answered(client: OpenAI) -> None:
    """By the model in float32, where noise is too small to change a draw."""
    alone = four(client, TINY)
    other = {"model": TINY, "max_tokens": 500, "logit_bias": ENDLESS["logit_bias"]}
    with ExitStack() as stack:
        for seed in range(3):
            stream = ask_streaming(client, temperature=1.0, seed=seed, **other)
            next(stack.enter_context(closing(stream)))
        assert four(client, TINY) == alone


def test_a_deterministic_answer_has_the_same_bits_in_company(client: OpenAI) -> None:
    asked = {"model": TINY, "temperature": 1.0, "max_tokens": 20, "logprobs": True}

    def answer(value: str) -> Any:
        found = ask(client, **asked, extra_headers={"x-mlx-server-deterministic": value})
        return found.choices[0].model_dump()

    alone = answer("true")
    other = {"model": TINY, "max_tokens": 500, "logit_bias": ENDLESS["logit_bias"]}
    with closing(ask_streaming(client, temperature=1.0, **other)) as stream:
        next(stream)
        assert answer("true") == alone
    with pytest.raises(BadRequestError, match="should be `true` or `false`"):
        answer("yes")


def test_a_pattern_with_too_many_states_is_refused_by_name(client: OpenAI) -> None:
    """Its states are made as the answer grows, so it compiles."""
    schema = {"type": "string", "pattern": "^((a)+)*.{900}$"}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(BadRequestError, match="too many states: use fewer repetitions"):
        ask(client, model=TINY, max_tokens=30, response_format=asked)


# Log probabilities


FEW = {"model": SHALLOW, "max_tokens": 6}


@pytest.mark.parametrize(
    ("asked", "top"), [(FEW, 0), (FEW, 3), ({}, 3)], ids=["none", "three", "to the end"]
)
def test_log_probabilities(client: OpenAI, asked: dict[str, Any], top: int) -> None:
    whole = ask(client, logprobs=True, top_logprobs=top, **asked)
    entries = logprobs_of(whole)
    assert whole.usage
    ended = whole.choices[0].finish_reason == "stop"  # by a token that is no part of the answer
    assert len(entries) == whole.usage.completion_tokens - ended
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode() == text_of(whole)
    for entry in entries:
        best = [(top.token, top.logprob) for top in entry.top_logprobs]
        assert len(best) == top
        assert best[:1] in ([], [(entry.token, entry.logprob)])  # greedy: the best was taken

    chunks = list(ask_streaming(client, logprobs=True, top_logprobs=top, **asked))
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or []
    ]
    # the second prompt is cached but for its last token, whose pass has another shape
    rounded = [entry.model_dump(exclude={"logprob", "top_logprobs"}) for entry in streamed]
    assert rounded == [entry.model_dump(exclude={"logprob", "top_logprobs"}) for entry in entries]
    assert [each.logprob for each in streamed] == pytest.approx(
        [e.logprob for e in entries], abs=1e-5
    )


# Stop strings


def stops(pieces: list[str]) -> dict[str, list[str]]:
    """Stop strings for a text that comes in these pieces."""
    return {
        "one": [pieces[3]],
        "across a border": [pieces[2][-1:] + pieces[3][:2]],
        "over three pieces": ["".join(pieces[2:5])],
        "the first of several": ["not in there", "".join(pieces[4:6]), "".join(pieces[1:3])],
        "the one that is complete first": ["".join(pieces[1:5]), pieces[2] + pieces[3]],
        "at the very start": [pieces[0][:1]],
        "all of the start": ["".join(pieces[:2])],
        "never": ["not in there"],
    }


def test_stop_strings_are_never_leaked(client: OpenAI) -> None:
    common: dict[str, Any] = {"model": SHALLOW, "messages": COUNT, "max_tokens": 8}
    full = ask(client, **common, logprobs=True)
    text = text_of(full)
    pieces = [entry.token for entry in logprobs_of(full)]
    for name, stop in stops(pieces).items():
        ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
        expected = (text[: min(ends)[1]], "stop") if ends else (text, "length")
        asked = {**common, "stop": stop}
        assert answered(ask(client, **asked)) == expected, name
        assert answered(ask_streaming(client, **asked)) == expected, name
