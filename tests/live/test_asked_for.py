"""What an answer shows besides its text: its raw output, and the tokens of outputs of tools."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract import pairs
from tests.live.common import Models, common_models, transcript
from tests.live.server import LiveServer

LOUD = "loud"
FAMILIES = ("smollm3", "gpt_oss", *pairs.WITHOUT_CALLS[:1])
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@common_models
def models(folder: Path, _: object) -> Models:
    for name in FAMILIES:
        transcript(folder / f"{name}.jsonl", [{"output": pairs.script(name)}])
    transcript(folder / "loud.jsonl", [{"output": "It is so."}])
    own = {raw(name): {"source": f"replay:{name}.jsonl", "family": name} for name in FAMILIES}
    return {**own, LOUD: {"source": "replay:loud.jsonl", "family": "qwen3"}}


def raw(family: str) -> str:
    """Its model."""
    return f"raw-{family}"


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as http:
        http.timeout = httpx.Timeout(120)  # Harmony's vocabulary is made for the first request
        yield http


def body(model: str, text: str = "Well?", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def chunks(http: httpx.Client, path: str, asking: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with http.stream("POST", path, json={**asking, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def raw_of(found: Any) -> list[str]:
    return [each["text"] for each in found.get("mlx_server", {}).get("raw", [])]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_raw_output_of_any_family_on_request(http: httpx.Client, family: str) -> None:
    model = raw(family)
    asking = body(model, include_raw=True)
    (whole,) = raw_of(http.post("/v1/chat/completions", json=asking).json())
    said = pairs.script(family)
    assert whole.startswith(said)
    assert 0 < len(whole) - len(said) < 40  # the token that ended it
    *_, last = chunks(http, "/v1/chat/completions", asking)
    assert raw_of(last) == [whole]
    responding = {"model": model, "input": "Well?", "include_raw": True}
    assert raw_of(http.post("/v1/responses", json=responding).json()) == [whole]
    *_, end = chunks(http, "/v1/responses", responding)
    assert raw_of(end["response"]) == [whole]
    assert "mlx_server" not in http.post("/v1/chat/completions", json=body(model)).json()


def test_tool_outputs_of_clients_are_counted_once(server: LiveServer, http: httpx.Client) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asking = body(LOUD, "Look!", tools=[TOOL])
    asking["messages"] += [
        {"role": "assistant", "tool_calls": [call, {**call, "id": "d"}]},
        {"role": "tool", "tool_call_id": "c", "content": "12345"},
        {"role": "tool", "tool_call_id": "d", "content": "123"},
    ]
    usage = http.post("/v1/chat/completions", json=asking).json()["usage"]
    assert usage["prompt_tokens_details"]["tool_output_tokens"] == 8
    assert server.counted("mlx_server_tool_output_tokens_total", LOUD) == 8
    asking["messages"] += [
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "And now?"},
    ]
    usage = http.post("/v1/chat/completions", json=asking).json()["usage"]
    assert "tool_output_tokens" not in usage["prompt_tokens_details"]
    assert server.counted("mlx_server_tool_output_tokens_total", LOUD) == 8
