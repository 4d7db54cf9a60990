from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.api.chat_completions.input import ChatBody, to_request
from mlx_server.messages import Conversation
from mlx_server.requests import NamedTool, ToolChoice
from tests.api import wire
from tests.api.wire import Json, ScriptedEngine, error

BODY: Json = {"model": wire.MODEL, "messages": [{"role": "user", "content": "hi"}]}


def tool(name: str) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def named(name: Any) -> Json:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: Any, *names: str) -> Json:
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOOLS = [tool("f"), tool("g")]


@pytest.fixture(scope="module")
def client(tiny_path: Path) -> Iterator[TestClient]:
    with wire.client(tiny_path, ScriptedEngine()) as client:
        yield client


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        (None, "auto", ["f", "g"]),
        ("auto", "auto", ["f", "g"]),
        ("none", "none", ["f", "g"]),
        ("required", "required", ["f", "g"]),
        (named("g"), NamedTool("g"), ["f", "g"]),
        (allowed("auto", "g"), "auto", ["g"]),
        (allowed("required", "g", "f", "g"), "required", ["f", "g"]),
    ],
)
def test_choices(choice: Any, expected: ToolChoice, names: list[str]) -> None:
    """The prompt stays as it is, so that what was computed of it serves again."""
    body = ChatBody.model_validate({**BODY, "tools": TOOLS, "tool_choice": choice})
    request = to_request(body)
    (conversation,) = request.prompts
    assert isinstance(conversation, Conversation)
    assert request.tool_choice == expected
    assert [tool.name for tool in conversation.tools] == names


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_choices_that_need_no_tools(choice: str | None) -> None:
    assert to_request(ChatBody.model_validate({**BODY, "tool_choice": choice})).prompts


def test_a_long_name_is_not_said_back_in_full(client: TestClient) -> None:
    asked = {**BODY, "tools": TOOLS, "tool_choice": named("x" * 10_000)}
    assert len(error(client.post("/v1/chat/completions", json=asked))["message"]) < 300
