"""Reasoning and calls on a real server, beyond what the golden outputs show."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.live.chats import answer_of
from tests.live.common import Models, common_models, transcript
from tests.live.server import LiveServer

IGNORED = "x-mlx-server-ignored"
LED, NOT_LED, SHORT = "led-on", "left-alone", "led-on-short"
CONTEXT = 48
"""Of the short one, in tokens."""
BRIDGE = len("\n") + 1 + len("\n\n")
"""Tokens that lead Qwen on."""
HELD = "led-on-held"
"""Whose calls a grammar holds."""
HARMONY, HELD_HARMONY = "gpt-oss", "held-gpt-oss"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


COUNT = tool("count", to={"type": "integer"})
MISCOUNTS = '<tool_call>\n{"name": "count", "arguments": {"to": "x"}}\n</tool_call>'

# Behind the token that ends an answer stands what the model says if it is led on.
ENTRIES: list[dict[str, Any]] = [
    {"match": "forgets", "output": "<think>\nSo be it.<|im_end|>It is so."},
    {"match": "gives up", "output": "<think>\nSo be it.<|im_end|>"},
    {"match": "is cut", "output": "<think>\nSo be it.", "finish": "length"},
    {
        "match": "then counts",
        "output": f"<think>\nSo.<|im_end|>{MISCOUNTS}",
        "off_grammar": "noise",
    },
    {"match": "thinks twice", "output": "<think>\nSo.<|im_end|><think>\nBut no.</think>No."},
    {"match": "thinks aloud", "output": "<think>\nSo be it, and so on.\n</think>"},
    {"match": "answers", "output": "<think>\nSo be it.\n</think>\n\nIt is so."},
]
HARMONY_ENTRIES = [
    {"match": "forgets", "output": "<|channel|>analysis<|message|>So be it.<|return|>It is so."},
    {
        "match": "thinks aloud",
        "output": "<|channel|>analysis<|message|>So be it, and so on, and on.<|return|>",
        "off_grammar": "noise",
    },
    {
        "match": "thinks and calls",
        "output": "<|channel|>analysis<|message|>So be it, and so on, and on.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.count <|constrain|>json<|message|>"
        '{"to": 7}<|call|>',
    },
    {
        "match": "thinks and says",
        "output": "<|channel|>analysis<|message|>So be it, and so on, and on.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I count.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Seven.<|return|>",
    },
]


@common_models
def models(folder: Path, _: object) -> Models:
    transcript(folder / "said.jsonl", ENTRIES)
    transcript(folder / "harmony.jsonl", HARMONY_ENTRIES)
    said = {"source": "replay:said.jsonl", "family": "qwen3"}
    harmony = {"source": "replay:harmony.jsonl", "family": "gpt_oss"}
    return {
        LED: said,
        NOT_LED: {**said, "repair": {"mistakes": False}},
        SHORT: {**said, "context_length": CONTEXT},
        HELD: {**said, "constrain_calls": True},
        HELD_HARMONY: {**harmony, "constrain_calls": True},
        HARMONY: {
            **harmony,
            "template_kwargs": {"model_identity": "You are short.", "unheard_of": 1},
        },
    }


def asked(client: OpenAI, model: str, text: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=model, messages=messages, **more)


def said(found: Any) -> tuple[str, str, str | None]:
    answer = answer_of(found)
    return answer.reasoning, answer.text, answer.finish


def called(found: Any) -> list[str]:
    """The arguments of its calls."""
    return [arguments for _, arguments in answer_of(found).calls]


def led_on(server: LiveServer, model: str) -> float:
    return server.counted("mlx_server_led_on_total", model)


@pytest.mark.parametrize("model", [LED, HARMONY])
def test_an_answer_that_stops_after_its_reasoning_is_led_on(
    server: LiveServer, client: OpenAI, model: str
) -> None:
    before = led_on(server, model)
    whole = asked(client, model, "forgets")
    assert said(whole) == ("So be it.", "It is so.", "stop")
    assert said(asked(client, model, "forgets", stream=True)) == said(whole)
    assert led_on(server, model) == before + 2
    usage = whole.usage
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_once_and_not_again(client: OpenAI) -> None:
    """What it thought is all that there is then."""
    assert said(asked(client, LED, "gives up")) == ("So be it.", "So be it.", "stop")


def test_the_owner_may_turn_it_off(server: LiveServer, client: OpenAI) -> None:
    assert said(asked(client, NOT_LED, "forgets")) == ("So be it.", "", "stop")
    assert led_on(server, NOT_LED) == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_what_is_led_on_is_held_to_what_was_asked_for(
    server: LiveServer, client: OpenAI, choice: str, stream: bool
) -> None:
    before = led_on(server, HELD)
    asking: Any = {"tools": [COUNT], "tool_choice": choice, "max_tokens": 100}
    found = asked(client, HELD, "then counts", stream=stream, temperature=0, **asking)
    if choice == "none":
        _, text, _ = said(found)
        assert text
        assert "<tool_call>" not in text
    else:
        (reported, *_) = called(found)
        assert type(json.loads(reported)["to"]) is int
    assert led_on(server, HELD) == before + 1


def test_a_budget_holds_for_both_parts_together(server: LiveServer, client: OpenAI) -> None:
    before = led_on(server, LED)
    found = asked(client, LED, "thinks twice", extra_body={"thinking_budget": 8})
    reasoning, text, _ = said(found)
    assert reasoning.startswith("So.\n\nB")
    assert text == "No."
    assert found.usage.completion_tokens_details.reasoning_tokens == 8
    assert led_on(server, LED) == before + 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("limit", [{"thinking_budget": 3}, {"reasoning_effort": "none"}])
@pytest.mark.parametrize("model", [HARMONY, HELD_HARMONY])
def test_harmony_may_call_after_its_reasoning_was_ended(
    client: OpenAI, model: str, limit: dict[str, Any], stream: bool
) -> None:
    asking: Any = {"tools": [COUNT], "temperature": 0, "stream": stream, "extra_body": limit}
    found = asked(client, model, "thinks and calls", **asking)
    (reported,) = called(found)
    assert json.loads(reported) == {"to": 7}
    found = asked(client, model, "thinks and says", **asking)
    reasoning, text, end = said(found)
    assert (text, end) == ("I count.\nSeven.", "stop")
    assert len(reasoning) < len("So be it, and so")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("budget", [0, 5])
@pytest.mark.parametrize("model", [LED, HARMONY])
def test_a_piece_of_reasoning_is_no_answer(
    client: OpenAI, model: str, budget: int, stream: bool
) -> None:
    """The model has nothing to say after it."""
    asking: Any = {"extra_body": {"thinking_budget": budget}, "stream": stream}
    found = asked(client, model, "thinks aloud", **asking)
    reasoning, text, end = said(found)
    assert (text, end) == ("", "stop")
    assert "So be it, and so on".startswith(reasoning.strip())
    assert bool(reasoning) == bool(budget)


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_that_a_grammar_ends_at_the_limit_is_cut(client: OpenAI, stream: bool) -> None:
    asking: Any = {"tools": [COUNT], "max_tokens": 60, "stream": stream, "temperature": 0}
    found = asked(client, HELD_HARMONY, "thinks aloud", **asking)
    reasoning, text, end = said(found)
    assert reasoning.startswith("So be it, and so on, and on.")
    assert (text, end) == ("", "length")


@pytest.mark.parametrize("text", ["answers", "is cut"])
def test_others_are_left_alone(server: LiveServer, client: OpenAI, text: str) -> None:
    before = led_on(server, LED)
    reasoning, _, end = said(asked(client, LED, text))
    assert reasoning == "So be it."
    assert end == ("length" if text == "is cut" else "stop")
    assert led_on(server, LED) == before


def test_the_limit_holds_for_both_parts_together(server: LiveServer, client: OpenAI) -> None:
    reasoning_tokens = len("<think>\nSo be it.") - len("<think>") + 1
    found = asked(client, LED, "forgets", max_tokens=reasoning_tokens + 1 + 4)
    assert said(found) == ("So be it.", "It i", "length")
    assert found.usage.completion_tokens == reasoning_tokens + 1 + 4
    # no room is left for a single token more
    before = led_on(server, LED)
    asked(client, LED, "forgets", max_tokens=reasoning_tokens + 1)
    assert led_on(server, LED) == before


def test_what_leads_an_answer_on_takes_room_in_the_context(client: OpenAI) -> None:
    found = asked(client, SHORT, "forgets")
    reasoning, text, end = said(found)
    assert (reasoning, end) == ("So be it.", "length")
    assert "It is so.".startswith(text)
    assert text
    stop = 1  # which is counted, and not kept
    assert found.usage.total_tokens - stop + BRIDGE == CONTEXT


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_is_looked_for_in_the_text_alone(client: OpenAI, stream: bool) -> None:
    found = asked(client, LED, "answers", stop="so", stream=stream)
    assert said(found) == ("So be it.", "It is ", "stop")
    found = asked(client, LED, "answers", stop="be", stream=stream)
    assert said(found)[1] == "It is so."


def test_the_owner_sets_what_the_template_reads(server: LiveServer, client: OpenAI) -> None:
    """A request may still say otherwise; and what the owner set is no news to it."""
    sizes = [
        asked(client, HARMONY, "forgets", extra_body={"chat_template_kwargs": more}).usage
        for more in ({}, {"model_identity": "You are a much, much longer identity than before."})
    ]
    assert sizes[1].prompt_tokens > sizes[0].prompt_tokens
    with server.http() as http:
        body = {"model": HARMONY, "messages": [{"role": "user", "content": "forgets"}]}
        answer = http.post("/v1/chat/completions", json=body)
    assert IGNORED not in answer.headers
