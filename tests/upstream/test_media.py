"""Images for a model on another server, from every dialect: a model that sees gets them."""

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.upstream.playing import Json, PlayingServer, events, gateway, says

DATA = "iVBORw0KGgo="
URL = f"data:image/png;base64,{DATA}"
SEEN: Json = {"type": "image_url", "image_url": {"url": URL}}
BLOCK: Json = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": DATA},
}
LINE = "[image: image/png, not shown: this model reads only text]"
IGNORED = "x-mlx-server-ignored"


@pytest.fixture(scope="module")
def seeing(upstream: PlayingServer) -> Iterator[TestClient]:
    models: Json = {"sees": {"capabilities": {"images": True}}, "reads": {}}
    with gateway(upstream.url, models) as client:
        yield client


def user(*parts: Json) -> list[Json]:
    return [{"role": "user", "content": [*parts]}]


ASKED: dict[str, tuple[str, Json, str]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": user({"type": "text", "text": "What?"}, SEEN)},
        "messages.content.image_url",
    ),
    "messages": (
        "/v1/messages",
        {"messages": user({"type": "text", "text": "What?"}, BLOCK), "max_tokens": 9},
        "messages.content.image",
    ),
    "responses": (
        "/v1/responses",
        {
            "input": user(
                {"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": URL}
            )
        },
        "input.content.input_image",
    ),
    "ollama": (
        "/api/chat",
        {"messages": [{"role": "user", "content": "What?", "images": [DATA]}], "stream": False},
        "messages.images",
    ),
    "generate": ("/api/generate", {"prompt": "What?", "images": [DATA], "stream": False}, "images"),
}


@pytest.mark.parametrize("dialect", ASKED)
def test_a_model_that_sees_gets_the_image(
    seeing: TestClient, upstream: PlayingServer, dialect: str
) -> None:
    path, body, place = ASKED[dialect]
    for model in ("sees", "reads"):
        upstream.plays(says("A cat."))
        answer = seeing.post(path, json={"model": model, **body})
        assert answer.status_code == 200, answer.text
        (sent,) = upstream.bodies[-1]["messages"]
        parts: list[Any] = [{"type": "text", "text": "What?"}, SEEN]
        told = f"What?\n{LINE}"
        if path.startswith("/api/"):  # Ollama's pictures have no place in the text, and come first
            parts, told = parts[::-1], f"{LINE}\nWhat?"
        assert sent["content"] == (told if model == "reads" else parts)
        assert (place in answer.headers.get(IGNORED, "")) == (model == "reads")


def test_the_image_of_a_result_follows_it(seeing: TestClient, upstream: PlayingServer) -> None:
    use: Json = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result: Json = {"type": "tool_result", "tool_use_id": "c", "content": [BLOCK]}
    talk: list[Any] = [*user(), {"role": "assistant", "content": [use]}, *user(result)]
    upstream.plays(says("A cat."))
    body = {"model": "sees", "messages": talk, "max_tokens": 9}
    answer = seeing.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    *_, called, told, shown = upstream.bodies[-1]["messages"]
    assert [called["role"], told["role"], shown["role"]] == ["assistant", "tool", "user"]
    assert "it follows in the next message" in told["content"]
    assert shown["content"] == [SEEN]
    assert IGNORED not in answer.headers


def test_an_image_is_not_part_of_the_estimated_prompt(
    seeing: TestClient, upstream: PlayingServer
) -> None:
    upstream.plays(says("A cat."))
    large = {**BLOCK, "source": {**BLOCK["source"], "data": DATA.rstrip("=") * 1000}}
    body = {"model": "sees", "messages": user(large), "max_tokens": 9, "stream": True}
    begun = next(events(seeing.post("/v1/messages", json=body).text))
    assert begun["message"]["usage"]["input_tokens"] < 100
