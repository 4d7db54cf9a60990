from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.api.chat_completions.input import ChatBody, to_request
from mlx_server.api.responses import input as responses
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.messages import Conversation
from mlx_server.prompts.reasoning_effort import EFFORTS
from mlx_server.requests import GenerateRequest
from tests.api import wire
from tests.api.wire import Json, ScriptedEngine, ok

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
EVERYWHERE = pytest.mark.parametrize("path", [CHAT, RESPONSES])
BODY: Json = {"model": wire.MODEL, "messages": [{"role": "user", "content": "hi"}]}
NOTHING: Json = {}
EFFORT = "reasoning_effort"
IGNORED = "x-mlx-server-ignored"


@pytest.fixture(scope="module")
def client(tiny_path: Path) -> Iterator[TestClient]:
    with wire.client(tiny_path, ScriptedEngine()) as client:
        yield client


def body(path: str, asked: Json) -> Json:
    """asked: as chat completions have it."""
    if path == CHAT:
        return {**BODY, **asked}
    given = {"reasoning": {"effort": asked["reasoning_effort"]}} if EFFORT in asked else {}
    rest = {name: value for name, value in asked.items() if name != EFFORT}
    return {"model": wire.MODEL, "input": "hi", "store": False, **rest, **given}


def request_of(path: str, asked: Json) -> GenerateRequest:
    if path == CHAT:
        return to_request(ChatBody.model_validate(body(path, asked)))
    read = ResponsesBody.model_validate(body(path, asked))
    items = responses.input_items(read, NOTHING.__getitem__)
    return responses.to_request(read, items, opened=NOTHING.get).request


def thinking(path: str = CHAT, **asked: Any) -> tuple[int | None, Json]:
    """The engine's budget, and the templates' variables."""
    request = request_of(path, asked)
    (conversation,) = request.prompts
    assert isinstance(conversation, Conversation)
    return request.thinking_budget, dict(conversation.template_kwargs)


@EVERYWHERE
@pytest.mark.parametrize(
    ("asked", "budget", "reported"),
    [
        ({}, None, {}),
        ({"thinking_budget": 5}, 5, {"thinking_budget": 5}),
        ({"thinking_budget": 0}, 0, {"thinking_budget": 0}),
        ({"reasoning_effort": "high"}, None, {"reasoning_effort": "high"}),
        ({"thinking": {"type": "disabled"}}, None, {"reasoning_effort": "none"}),
        (
            {"thinking": {"type": "disabled"}, "reasoning_effort": "none"},
            None,
            {"reasoning_effort": "none"},
        ),
        ({"thinking": {"type": "enabled"}}, None, {"reasoning_effort": "medium"}),
        ({"thinking": {"type": "adaptive"}}, None, {"reasoning_effort": "medium"}),
        ({"thinking": {"type": "auto"}}, None, {"reasoning_effort": "medium"}),
        ({"enable_thinking": False}, None, {"reasoning_effort": "none"}),
        ({"enable_thinking": True}, None, {"reasoning_effort": "medium"}),
        (
            {"enable_thinking": True, "thinking": {"type": "enabled", "budget_tokens": 9}},
            9,
            {"reasoning_effort": "medium", "thinking_budget": 9},
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}, "reasoning_effort": "low"},
            9,
            {"reasoning_effort": "low", "thinking_budget": 9},
        ),
        ({"chat_template_kwargs": {"thinking_budget": 7}}, 7, {"thinking_budget": 7}),
        ({"chat_template_kwargs": {"thinking_budget": -1}}, None, {"thinking_budget": -1}),
        ({"chat_template_kwargs": {"thinking_budget": True}}, None, {"thinking_budget": True}),
        ({"chat_template_kwargs": {"thinking_budget": "7"}}, None, {"thinking_budget": "7"}),
        (
            {"chat_template_kwargs": {"thinking_budget": 10**30}},
            None,
            {"thinking_budget": 10**30},
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "max"}},
            None,
            {"reasoning_effort": "max"},
        ),
    ],
)
def test_budgets_and_efforts(path: str, asked: Json, budget: int | None, reported: Json) -> None:
    assert thinking(path, **asked) == (budget, reported)


@pytest.mark.parametrize(
    ("reasoning", "budget", "kwargs"),
    [
        ({"effort": "high"}, None, {"reasoning_effort": "high"}),
        ({"max_tokens": 5}, 5, {"thinking_budget": 5}),
        (
            {"enabled": True, "max_tokens": 5},
            5,
            {"reasoning_effort": "medium", "thinking_budget": 5},
        ),
        ({"enabled": True}, None, {"reasoning_effort": "medium"}),
        ({"enabled": False}, None, {"reasoning_effort": "none"}),
        ({"effort": None, "max_tokens": None, "enabled": None, "exclude": False}, None, {}),
    ],
)
def test_all_in_one_object(reasoning: Json, budget: int | None, kwargs: Json) -> None:
    assert thinking(reasoning=reasoning) == (budget, kwargs)


def test_the_object_does_not_override_the_effort() -> None:
    asked: Json = {"reasoning_effort": "low", "reasoning": {"effort": "high"}}
    assert thinking(**asked) == (None, {"reasoning_effort": "low"})
    assert "reasoning.effort" in ChatBody.model_validate({**BODY, **asked}).ignored()


@pytest.mark.parametrize(
    ("reasoning", "ignored"),
    [
        ({"effort": "low"}, "reasoning.effort"),
        ({"effort": "none"}, None),
        ({"max_tokens": 5, "exclude": True}, None),
        ({"enabled": True}, "reasoning.enabled"),
        ({"enabled": False, "summary": "auto"}, "reasoning.summary"),
    ],
)
def test_what_is_ignored_of_the_object(
    client: TestClient, reasoning: Json, ignored: str | None
) -> None:
    response = client.post(CHAT, json={**BODY, "reasoning": reasoning})
    ok(response)
    assert response.headers.get(IGNORED) == ignored


@pytest.mark.parametrize("effort", EFFORTS)
def test_the_efforts_there_are(effort: str) -> None:
    assert thinking(reasoning_effort=effort) == (None, {"reasoning_effort": effort})


@EVERYWHERE
@pytest.mark.parametrize(
    ("asked", "ignored"),
    [
        ({"thinking_budget": 5}, None),
        ({"chat_template_kwargs": {"thinking_budget": 5}}, None),
        ({"chat_template_kwargs": {"thinking_budget": -1}}, "chat_template_kwargs.thinking_budget"),
        ({"reasoning_effort": "none"}, None),
        ({"chat_template_kwargs": {"reasoning_effort": "none"}}, None),
        ({"thinking": {"type": "disabled"}}, None),
        ({"enable_thinking": False}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, None),
        ({"enable_thinking": True, "thinking_budget": 5}, None),
        ({"thinking": {"type": "enabled"}}, "thinking.type"),
        ({"reasoning_effort": "low"}, EFFORT),
        ({"reasoning_effort": "low", "thinking_budget": 5}, EFFORT),
        ({"reasoning_effort": "none", "thinking_budget": 5}, EFFORT),
        ({"reasoning_effort": "high", "thinking_budget": 0}, EFFORT),
    ],
)
def test_what_the_engine_keeps_is_not_ignored(
    client: TestClient, path: str, asked: Json, ignored: str | None
) -> None:
    response = client.post(path, json=body(path, asked))
    ok(response)
    if path == RESPONSES and ignored == EFFORT:
        ignored = "reasoning.effort"
    assert response.headers.get(IGNORED) == ignored


def test_where_nothing_is_thought_a_budget_means_nothing(client: TestClient) -> None:
    response = client.post(
        "/v1/completions",
        json={"model": wire.MODEL, "prompt": "a", "thinking_budget": 5, "max_response_tokens": 5},
    )
    ok(response)
    assert response.headers[IGNORED] == "thinking_budget, max_response_tokens"


def test_the_limit_of_the_answer_reaches_the_request() -> None:
    body = ChatBody.model_validate({**BODY, "max_response_tokens": 5, "max_tokens": 9})
    request = to_request(body)
    assert (request.max_response_tokens, request.max_tokens) == (5, 9)
