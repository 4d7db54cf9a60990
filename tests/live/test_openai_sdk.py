"""The server as OpenAI's own client sees it. What need not be true, the shallow model says."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
)

from tests.live.chats import (
    CAPITAL,
    COUNT,
    ENDLESS,
    STORY,
    Answered,
    answered,
    answered_streaming,
    ask,
    ask_streaming,
    logprobs_of,
    text_of,
)
from tests.live.server import DEMO, SHALLOW, TINY, LiveServer, serving


def test_it_knows_the_capital_of_france(client: OpenAI) -> None:
    found = ask(client)
    assert "Paris" in text_of(found)
    assert found.choices[0].finish_reason == "stop"


def test_so_does_the_asynchronous_client(server: LiveServer, client: OpenAI) -> None:
    async def both() -> tuple[ChatCompletion, list[ChatCompletionChunk]]:
        async with server.openai_async() as client:
            whole = client.chat.completions.create(model=DEMO, messages=CAPITAL, temperature=0)
            stream = await client.chat.completions.create(
                model=DEMO, messages=CAPITAL, temperature=0, stream=True
            )
            return await whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(both())
    assert "Paris" in text_of(whole)
    assert answered_streaming(chunks)[1] == "stop"
    assert "Paris" in answered_streaming(chunks)[0]


@pytest.mark.tables
@pytest.mark.parametrize("asked", [{}, {"max_tokens": 5}, {"stop": " is"}])
def test_streaming_equals_not_streaming(client: OpenAI, asked: dict[str, Any]) -> None:
    whole = ask(client, **asked)
    *chunks, last = ask_streaming(client, stream_options={"include_usage": True}, **asked)
    assert answered_streaming(chunks) == answered(whole)
    assert last.usage == whole.usage
    assert last.choices == []


def test_the_sdks_own_accumulator_likes_the_stream(client: OpenAI) -> None:
    with client.chat.completions.stream(model=DEMO, messages=CAPITAL, temperature=0) as stream:
        found = stream.get_final_completion()
    assert answered(found) == answered(ask(client))


def test_pieces_come_as_they_are_made(client: OpenAI) -> None:
    contents = [c.choices[0].delta.content for c in ask_streaming(client, max_tokens=5)]
    assert [bool(content) for content in contents] == [False] + [True] * 5 + [False]


# Several answers, seeds


def four(client: OpenAI, model: str) -> list[str]:
    found = ask(client, model=model, messages=STORY, n=4, seed=7, temperature=1.0, max_tokens=12)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in found.choices} <= {"length", "stop"}
    return [choice.message.content or "" for choice in found.choices]


@pytest.mark.tables
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


def test_streams_of_several_answers(client: OpenAI) -> None:
    asked: dict[str, Any] = {"messages": STORY, "n": 2, "seed": 3, "temperature": 1.0}
    asked["model"] = SHALLOW
    whole = ask(client, max_tokens=8, **asked)
    chunks = list(ask_streaming(client, max_tokens=8, **asked))
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]


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
    assert streamed == entries


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
        assert answered_streaming(list(ask_streaming(client, **asked))) == expected, name


# Lengths and usage


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 3}, 3),
        ({"max_completion_tokens": 3, "max_tokens": 5}, 3),
        ({"max_completion_tokens": 5, "max_tokens": 3}, 5),
        ({"max_completion_tokens": None, "max_tokens": 1}, 1),
    ],
)
def test_length_limits(client: OpenAI, asked: dict[str, Any], tokens: int) -> None:
    found = ask(client, model=SHALLOW, **asked)
    assert found.usage
    assert found.usage.completion_tokens == tokens
    assert found.choices[0].finish_reason == "length"


def test_usage(client: OpenAI) -> None:
    common: dict[str, Any] = {"model": SHALLOW, "max_tokens": 4}
    one, three = ask(client, **common).usage, ask(client, **common, n=3).usage
    assert one
    assert three
    assert one.total_tokens == one.prompt_tokens + 4
    assert three.prompt_tokens == one.prompt_tokens
    assert three.completion_tokens == 12
    longer = ask(client, **{**common, "messages": [*CAPITAL, *COUNT]}).usage
    assert longer
    assert longer.prompt_tokens > one.prompt_tokens


# Models and errors


def test_models(client: OpenAI) -> None:
    listed = [model.id for model in client.models.list()]
    assert listed == [DEMO, SHALLOW, TINY]
    assert client.models.retrieve(DEMO).id == DEMO
    assert client.models.retrieve("small").id == TINY
    assert ask(client, model="small", max_tokens=1).model == TINY


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("asked", "error", "param", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": 3}, openai.BadRequestError, "temperature", None),
        ({"messages": []}, openai.BadRequestError, "messages", None),
        (
            {"messages": [{"role": "user", "content": "x " * 9000}]},
            openai.BadRequestError,
            "messages",
            "context_length_exceeded",
        ),
        (
            {"extra_headers": {"origin": "http://evil.example"}},
            openai.PermissionDeniedError,
            None,
            "forbidden",
        ),
        (
            {"extra_headers": {"content-type": "text/plain"}},
            openai.APIStatusError,
            None,
            "unsupported_media_type",
        ),
    ],
)
def test_errors_are_the_sdks_own(
    client: OpenAI,
    asked: dict[str, Any],
    error: type[openai.APIStatusError],
    param: str | None,
    code: str | None,
    stream: bool,
) -> None:
    with pytest.raises(error) as caught:
        ask(client, stream=stream, **asked)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_errors_of_the_other_routes(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as no_model:
        client.models.retrieve("other")
    assert no_model.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as no_route:
        client.images.generate(prompt="x")
    assert no_route.value.code == "not_found"


def test_keys(tmp_path: Path, tiny_path: Path) -> None:
    config = {"server": {"api_keys": ["right"]}, "models": {TINY: {"source": str(tiny_path)}}}
    with (
        serving(tmp_path, config) as server,
        server.openai(api_key="wrong") as wrong,
        server.openai(api_key="right") as right,
    ):
        with pytest.raises(openai.AuthenticationError) as caught:
            ask(wrong, model=TINY)
        assert caught.value.code == "invalid_api_key"
        assert ask(right, model=TINY, max_tokens=1).choices


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    gone = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    with gone, pytest.raises(openai.APIConnectionError):
        ask(gone)


@pytest.mark.parametrize("stream", [True, False])
def test_headers(client: OpenAI, stream: bool) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=SHALLOW,
        messages=CAPITAL,
        max_tokens=2,
        stream=stream,
        extra_body={"mirostat": 2, "adapter": None},
        extra_headers={"x-request-id": "mine"},
    )
    assert raw.headers["x-mlx-server-ignored"] == "mirostat"
    assert raw.headers["x-request-id"] == "mine"
    raw.http_response.close()


def test_many_at_once(client: OpenAI) -> None:
    alone = answered(ask(client, model=TINY, max_tokens=20))

    def one(_: int) -> Answered:
        return answered(ask(client, model=TINY, max_tokens=20))

    with ThreadPoolExecutor(24) as threads:
        assert set(threads.map(one, range(24))) == {alone}


def test_stored_completions(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": SHALLOW, "store": True, "max_tokens": 4}
    made = ask(client, metadata={"topic": "France"}, **asked)
    other = ask(client, **asked)
    assert client.chat.completions.retrieve(made.id).choices == made.choices
    everything = [each.id for each in client.chat.completions.list(limit=1)]
    assert everything[-2:] == [made.id, other.id]
    found = client.chat.completions.list(metadata={"topic": "France"}, model=made.model)
    assert [each.id for each in found] == [made.id]
    messages = client.chat.completions.messages.list(made.id)
    assert [message.content for message in messages] == [CAPITAL[0]["content"]]
    client.chat.completions.update(made.id, metadata={"topic": "Paris"})
    assert not list(client.chat.completions.list(metadata={"topic": "France"}))
    for each in (made, other):
        assert client.chat.completions.delete(each.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(made.id)
