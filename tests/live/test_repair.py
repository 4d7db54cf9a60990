"""Answers that no grammar held to all that was asked: mended, or made once more."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.live.server import LiveServer, serving

QUESTION = "Three numbers"
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "numbers",
        "strict": False,
        "schema": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    },
}
SAID = [
    {"match": QUESTION, "output": "<think>\nEasy.\n</think>\n\n[1, 1]"},
    {"match": "Thought", "output": "<think>\nIt is 4.\n</think>\n\n"},
    # to whatever else it is told
    {"output": "<think>\nOnce more.\n</think>\n\n[1, 2]"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("repair")
    (folder / "said.jsonl").write_text("\n".join(map(json.dumps, SAID)), "utf-8")
    model = {"source": "replay:said.jsonl", "family": "qwen3", "lead_on": False}
    models = {
        "live": model,
        "held": {**model, "repair": {"streaming": "accumulate"}},
        "once": {**model, "repair": {"retries": 0, "promote_reasoning": False}},
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLX_SERVER_CACHE", str(folder / "cache"))
        with serving(folder, {"models": models}) as server:
            yield server
            assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client


def asked(client: OpenAI, model: str, question: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    return client.chat.completions.create(model=model, messages=messages, **more)


def repairs(body: Any) -> list[tuple[str, str]]:
    told = (body.model_extra or {}).get("mlx_server", {"repairs": []})
    return [(repair["what"], repair["where"]) for repair in told["repairs"]]


def streamed(client: OpenAI, model: str, **more: Any) -> tuple[str, str, list[tuple[str, str]]]:
    chunks = list(asked(client, model, QUESTION, stream=True, **more))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    reasoning = "".join((d.model_extra or {}).get("reasoning", "") for d in deltas)
    return reasoning, "".join(d.content or "" for d in deltas), repairs(chunks[-1])


def test_an_answer_that_breaks_its_schema_is_made_once_more(client: OpenAI) -> None:
    body = asked(client, "live", QUESTION, response_format=FORMAT)
    message = body.choices[0].message
    assert message.content == "[1, 2]"
    assert message.reasoning == "Once more."
    assert repairs(body) == [("schema", "content")]
    assert body.model_extra["mlx_server"]["unenforced"] == ["uniqueItems at #"]
    # both attempts cost what they cost
    alone = asked(client, "once", QUESTION, response_format=FORMAT)
    assert body.usage.completion_tokens > alone.usage.completion_tokens


def test_where_nobody_allows_it_the_answer_is_told_as_it_is(client: OpenAI) -> None:
    body = asked(client, "once", QUESTION, response_format=FORMAT)
    assert body.choices[0].message.content == "[1, 1]"
    assert repairs(body) == []


def test_what_was_streamed_is_not_made_again(client: OpenAI) -> None:
    assert streamed(client, "live", response_format=FORMAT) == ("Easy.", "[1, 1]", [])


def test_a_stream_that_is_held_back_is_mended(client: OpenAI) -> None:
    mended = ("Once more.", "[1, 2]", [("schema", "content")])
    assert streamed(client, "held", response_format=FORMAT) == mended


def test_an_answer_without_a_gap_in_its_grammar_is_not_held_back(client: OpenAI) -> None:
    reasoning, text, mended = streamed(client, "held")
    assert (reasoning, text, mended) == ("Easy.", "[1, 1]", [])


def test_each_of_several_answers_is_checked_by_itself(client: OpenAI) -> None:
    body = asked(client, "live", QUESTION, response_format=FORMAT, n=2)
    assert [choice.message.content for choice in body.choices] == ["[1, 2]"] * 2
    told = body.model_extra["mlx_server"]["repairs"]
    assert sorted(repair["index"] for repair in told) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_the_answer_where_there_is_no_other(client: OpenAI, stream: bool) -> None:
    if stream:
        chunks = list(asked(client, "live", "Thought", stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        mended = repairs(chunks[-1])
    else:
        body = asked(client, "live", "Thought")
        text, mended = body.choices[0].message.content, repairs(body)
    assert (text, mended) == ("It is 4.", [("reasoning", "content")])


def test_unless_its_owner_does_not_want_that(client: OpenAI) -> None:
    body = asked(client, "once", "Thought")
    assert body.choices[0].message.content == ""
    assert repairs(body) == []
