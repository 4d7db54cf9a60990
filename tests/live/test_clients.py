"""Conversations with tools, through OpenAI's own client: the server remembers, the client calls.

scripts/conformance has them with other clients too.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import Response

from tests.api.responses_schema import assert_response, assert_stream
from tests.live.common import Models, common_models, transcript

Json = dict[str, Any]
Ask = Callable[..., Response]
"""With the fields of a request that make its turn."""

QUESTIONS = ("How warm are Zürich and Bern?", "And Chur?")
DEGREES = {"Zürich": "18°", "Bern": "16°", "Chur": "21°"}
ANSWERS = ["18 and 16.", "21."]

TOOL: Any = {
    "type": "function",
    "name": "warmth",
    "description": "How warm a city is",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def tags(*cities: str) -> str:
    calls = ({"name": "warmth", "arguments": {"city": city}} for city in cities)
    reported = (
        f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls
    )
    return "<think>\nI have to look.\n</think>\n\n" + "\n".join(reported)


def harmony(city: str) -> str:
    return (
        "<|channel|>analysis<|message|>I have to look.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.warmth <|constrain|>json<|message|>"
        f"{json.dumps({'city': city}, ensure_ascii=False)}<|call|>"
    )


SAID = {
    "qwen3": [
        tags("Zürich", "Bern"),
        "<think>\nNow I know.\n</think>\n\n18 and 16.",
        tags("Chur"),
        "<think>\nNow I know.\n</think>\n\n21.",
    ],
    "gpt_oss": [
        harmony("Zürich"),
        harmony("Bern"),
        "<|channel|>final<|message|>18 and 16.<|return|>",
        harmony("Chur"),
        "<|channel|>final<|message|>21.<|return|>",
    ],
}


@common_models
def models(folder: Path, _: object) -> Models:
    for family, outputs in SAID.items():
        transcript(folder / f"{family}.jsonl", [{"output": output} for output in outputs])
    return {
        f"looks-{family}": {"source": f"replay:{family}.jsonl", "family": family} for family in SAID
    }


@pytest.fixture(params=SAID)
def model(request: pytest.FixtureRequest, client: OpenAI) -> str:
    """It answers in turn, and every test here goes once through all of its answers."""
    return f"looks-{request.param}"


def plain(found: Any) -> Json:
    """As it came over the wire."""
    reported: Json = found.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return reported


def converse(client: OpenAI, model: str, ask: Ask) -> None:
    """And each prompt is as long as that of a client that sends everything itself."""
    said: list[Any] = []
    cities, answers = [], []
    before: Json = {}
    for question in QUESTIONS:
        news: list[Any] = [{"role": "user", "content": question}]
        while news:
            said += news
            response = ask(input=news, **before)
            assert_response(plain(response))
            anew = client.responses.input_tokens.count(model=model, input=said, tools=[TOOL])
            assert response.usage
            assert response.usage.input_tokens == anew.input_tokens
            said += [item.model_dump() for item in response.output]
            before = {"previous_response_id": response.id}
            calls = [item for item in response.output if item.type == "function_call"]
            asked = [json.loads(call.arguments)["city"] for call in calls]
            cities += asked
            assert cities == list(DEGREES)[: len(cities)]
            news = [
                {"type": "function_call_output", "call_id": call.call_id, "output": DEGREES[city]}
                for call, city in zip(calls, asked, strict=True)
            ]
        answers.append(response.output_text)
    assert cities == list(DEGREES)
    assert answers == ANSWERS


def test_one_by_one(client: OpenAI, model: str) -> None:
    converse(client, model, partial(client.responses.create, model=model, tools=[TOOL]))


def test_streamed(client: OpenAI, model: str) -> None:
    def ask(**asked: Any) -> Response:
        stream: Any = client.responses.create(model=model, tools=[TOOL], stream=True, **asked)
        reported = list(stream)
        assert_stream([plain(event) for event in reported])
        response: Response = reported[-1].response
        return response

    converse(client, model, ask)


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager")  # it does not
@pytest.mark.parametrize("store", [True, False])
def test_over_a_websocket(client: OpenAI, model: str, store: bool) -> None:
    with client.responses.connect() as line:

        def ask(**asked: Any) -> Response:
            line.response.create(model=model, tools=[TOOL], store=store, **asked)
            reported = []
            for event in line:
                reported.append(plain(event))
                if event.type == "response.completed":
                    assert_stream(reported)
                    return event.response
            raise AssertionError("the line ended")

        converse(client, model, ask)


def test_in_a_conversation(client: OpenAI, model: str) -> None:
    id = client.conversations.create().id

    def ask(previous_response_id: str | None = None, **asked: Any) -> Response:
        made: Response = client.responses.create(
            model=model, tools=[TOOL], conversation=id, **asked
        )
        return made

    converse(client, model, ask)
    items = client.conversations.items.list(id, order="asc")
    results = [item.output for item in items if item.type == "function_call_output"]
    assert results == list(DEGREES.values())
