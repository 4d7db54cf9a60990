from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.api.chat_completions.input import to_request
from mlx_server.api.chat_completions.protocol import ChatBody
from mlx_server.families.effort import EFFORTS
from mlx_server.messages import Conversation
from tests.api import wire
from tests.api.wire import Json, ScriptedEngine, error, ok

PATH = "/v1/chat/completions"
BODY: Json = {"model": wire.MODEL, "messages": [{"role": "user", "content": "hi"}]}
IGNORED = "x-mlx-server-ignored"


@pytest.fixture(scope="module")
def client(tiny_path: Path) -> Iterator[TestClient]:
    with wire.client(tiny_path, ScriptedEngine()) as client:
        yield client


def thinking(**asked: Any) -> tuple[int | None, Json]:
    """The engine's budget, and what templates are told."""
    request = to_request(ChatBody.model_validate({**BODY, **asked}))
    (conversation,) = request.prompts
    assert isinstance(conversation, Conversation)
    return request.thinking_budget, dict(conversation.template_kwargs)


@pytest.mark.parametrize(
    ("asked", "budget", "told"),
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
def test_budgets_and_efforts(asked: Json, budget: int | None, told: Json) -> None:
    assert thinking(**asked) == (budget, told)


@pytest.mark.parametrize("effort", EFFORTS)
def test_the_efforts_there_are(effort: str) -> None:
    assert thinking(reasoning_effort=effort) == (None, {"reasoning_effort": effort})


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"reasoning_effort": "ultra"}, "reasoning_effort"),
        ({"reasoning_effort": "High"}, "reasoning_effort"),
        ({"reasoning_effort": ""}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"reasoning_effort": ["low"]}, "reasoning_effort"),
        ({"reasoning_effort": False}, "reasoning_effort"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": {"type": "adaptive"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1.5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10**30}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "reasoning_effort"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 5}, "thinking_budget": 5},
            "thinking.budget_tokens",
        ),
        (
            {"thinking_budget": 5, "chat_template_kwargs": {"thinking_budget": 6}},
            "chat_template_kwargs.thinking_budget",
        ),
    ],
)
def test_what_is_refused(client: TestClient, asked: Json, param: str) -> None:
    found = error(client.post(PATH, json={**BODY, **asked}))
    assert found["param"] == param
    assert param in found["message"]


def test_a_budget_that_the_engine_keeps_is_not_ignored(client: TestClient) -> None:
    for asked in ({"thinking_budget": 5}, {"chat_template_kwargs": {"thinking_budget": 5}}):
        response = client.post(PATH, json={**BODY, **asked})
        ok(response)
        assert IGNORED not in response.headers
    response = client.post(PATH, json={**BODY, "chat_template_kwargs": {"thinking_budget": -1}})
    assert response.headers[IGNORED] == "chat_template_kwargs.thinking_budget"


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
