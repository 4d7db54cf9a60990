"""Whatever a body holds, the answer is a valid one or a refusal that says why."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from schemathesis import Case, openapi
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.schemas import OpenApiSchema
from starlette.testclient import TestClient

from mlx_server.api.chat_completions.protocol import ChatBody
from mlx_server.api.completions.protocol import CompletionBody
from mlx_server.api.fields import SamplingBody
from mlx_server.api.native.protocol import NativeBody
from mlx_server.api.responses.protocol import ResponsesBody
from tests.api import wire
from tests.api.wire import Json, ScriptedEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
NATIVE = "/generate"
RESPONSES = "/v1/responses"

VALID: dict[str, Json] = {
    CHAT: {
        "model": wire.MODEL,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "me"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}],
        "stream": False,
        "stream_options": {"include_usage": True},
        "stop": ["x", "yz"],
        "logit_bias": {"5": -100},
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 10,
        "seed": 1,
        "chat_template_kwargs": {"a": 1},
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"properties": {"a": {"type": "string"}}}},
        },
        "reasoning_effort": "low",
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "max_response_tokens": 5,
    },
    COMPLETIONS: {
        "model": wire.MODEL,
        "prompt": [[1, 2], [3]],
        "stream": False,
        "echo": True,
        "logprobs": 2,
        "stop": "x",
        "logit_bias": {"5": -100},
        "max_tokens": 10,
        "temperature": 0.5,
        "structured_outputs": {"choice": ["x", "yz"]},
    },
    NATIVE: {
        "messages": [{"role": "user", "content": "hi"}],
        "two_pass": False,
        "think_tag": "think",
        "max_thinking_tokens": 5,
        "max_response_tokens": 5,
        "tools": [{"name": "f", "parameters": {"type": "object"}}],
        "tool_choice": "none",
        "tool_parser": "hermes",
        "stop": ["x"],
        "seed": 1,
    },
    RESPONSES: {
        "model": wire.MODEL,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": None},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            {"type": "message", "role": "assistant", "content": "x", "phase": "commentary"},
        ],
        "instructions": "Be brief.",
        "tools": [{"type": "function", "name": "f", "parameters": {"a": 1}, "strict": False}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "metadata": {"a": "b"},
        "max_output_tokens": 10,
        "top_logprobs": 2,
        "stream": False,
        "store": True,
        "background": False,
        "previous_response_id": None,
        "conversation": None,
        "truncation": "disabled",
    },
}
BODIES: dict[str, type[SamplingBody]] = {
    CHAT: ChatBody,
    COMPLETIONS: CompletionBody,
    NATIVE: NativeBody,
    RESPONSES: ResponsesBody,
}

WORDS = ["user", "tool", "text", "function", "role", "\r\n", "\0", "<|im_end|>"]
TEXTS = st.text(max_size=20) | st.sampled_from(WORDS)
NUMBERS = (
    st.integers(-2, 400)
    | st.integers()
    | st.floats(0, 2)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**399])
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES: SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def client(tiny_path: Path, engine: ScriptedEngine) -> Iterator[TestClient]:
    with wire.client(tiny_path, engine) as client:
        yield client


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    """A valid one with up to three of its parts, at any depth, changed, added or left out."""
    body: Any = json.loads(json.dumps(VALID[path]))
    for _ in range(draw(st.integers(0, 3))):
        body = changed(draw, body, path)
    return body


def changed(draw: st.DrawFn, node: Any, path: str | None = None) -> Any:
    """path: of the body itself, for which parameters are known."""
    if isinstance(node, list) and node and draw(st.booleans()):
        place = draw(st.integers(0, len(node) - 1))
        return [*node[:place], changed(draw, node[place]), *node[place + 1 :]]
    if isinstance(node, dict) and (path or draw(st.integers(0, 4))):
        names = [*BODIES[path].model_fields, *BODIES[path].UNSUPPORTED] if path else []
        key = draw(st.sampled_from([*names, *node]) | TEXTS if names or node else TEXTS)
        if key in node and draw(st.integers(0, 3)) == 0:
            return {name: value for name, value in node.items() if name != key}
        return {**node, key: changed(draw, node.get(key))}
    return draw(VALUES)


@st.composite
def damaged(draw: st.DrawFn, path: str) -> bytes:
    """The text of a body with a piece of it overwritten."""
    text = json.dumps(draw(bodies(path)), ensure_ascii=draw(st.booleans()))
    raw = text.encode()
    start = draw(st.integers(0, len(raw)))
    end = draw(st.integers(start, min(len(raw), start + 5)))
    return raw[:start] + draw(st.binary(max_size=5)) + raw[end:]


def post(client: TestClient, path: str, content: bytes) -> httpx2.Response:
    return client.post(path, content=content, headers={"content-type": "application/json"})


def judge(path: str, response: httpx2.Response, engine: ScriptedEngine) -> None:
    assert not engine.running
    if response.status_code != 200:
        assert response.status_code in {400, 404}, response.text
        wire.error(response, response.status_code)
    elif response.headers["content-type"] == "application/json":
        body = wire.as_json(response)
        assert body["usage"]
        assert all(answer["finish_reason"] for answer in body.get("choices", [body]))
    else:
        assert wire.events(response)


def judge_response(client: TestClient, response: httpx2.Response) -> None:
    if response.status_code != 200:
        assert response.status_code in {400, 404}, response.text
        wire.error(response, response.status_code)
    elif response.headers["content-type"] == "application/json":
        body = wire.as_json(response)
        if body["background"]:  # nothing of it is to run on
            wire.ok(client.post(f"{RESPONSES}/{body['id']}/cancel"))
        else:
            assert body["usage"]
            assert body["status"] in {"completed", "incomplete"}
    else:
        *_, last, done, end = response.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert last.partition("\n")[0] in {
            f"event: response.{kind}" for kind in ("completed", "incomplete", "failed")
        }


many = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize("path", VALID)
def test_what_is_changed_is_valid_before(
    client: TestClient, engine: ScriptedEngine, path: str
) -> None:
    response = post(client, path, json.dumps(VALID[path]).encode())
    assert response.status_code == 200, response.text
    if path == RESPONSES:
        judge_response(client, response)
    else:
        judge(path, response, engine)


@many
@given(body=bodies(CHAT))
def test_chat_bodies(client: TestClient, engine: ScriptedEngine, body: Any) -> None:
    judge(CHAT, post(client, CHAT, json.dumps(body).encode()), engine)


@many
@given(body=bodies(COMPLETIONS))
def test_completion_bodies(client: TestClient, engine: ScriptedEngine, body: Any) -> None:
    judge(COMPLETIONS, post(client, COMPLETIONS, json.dumps(body).encode()), engine)


@many
@given(body=bodies(NATIVE))
def test_native_bodies(client: TestClient, engine: ScriptedEngine, body: Any) -> None:
    judge(NATIVE, post(client, NATIVE, json.dumps(body).encode()), engine)


@many
@given(body=bodies(RESPONSES))
def test_responses_bodies(client: TestClient, engine: ScriptedEngine, body: Any) -> None:
    judge_response(client, post(client, RESPONSES, json.dumps(body).encode()))


@many
@given(content=damaged(CHAT))
def test_damaged_bodies(client: TestClient, engine: ScriptedEngine, content: bytes) -> None:
    judge(CHAT, post(client, CHAT, content), engine)


@pytest.fixture
def documented(tiny_path: Path) -> OpenApiSchema:
    """Of an app of the test's own: schemathesis stops it after each."""
    app = wire.app(tiny_path, ScriptedEngine(), allowed_hosts=("testserver",))
    return openapi.from_asgi("/openapi.json", app)


@pytest.mark.parametrize("path", VALID)
def test_what_the_openapi_document_promises(documented: OpenApiSchema, path: str) -> None:
    @settings(many, max_examples=50)
    @given(case=documented[path]["POST"].as_strategy())
    def never_a_server_error(case: Case[Any]) -> None:
        response = case.call()
        case.validate_response(response, checks=[not_a_server_error])

    never_a_server_error()
