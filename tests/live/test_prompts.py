"""What the prompt says, on a real server: tools, schemas, and messages to be continued."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from tests.live.server import DEMO, SHALLOW, LiveServer, eventually, serving, start, stop

QUESTION: Any = {"role": "user", "content": "What is the capital of France?"}
BEGUN: Any = {"role": "assistant", "content": "The capital of France is"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city, now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
}


def ask(client: OpenAI, *messages: Any, **more: Any) -> Any:
    asked = {"model": SHALLOW, "temperature": 0, "max_tokens": 60, "messages": messages, **more}
    return client.chat.completions.create(**asked)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_choice_of_tools_is_kept(client: OpenAI, choice: Any, stream: bool) -> None:
    found = ask(client, QUESTION, tools=[TOOL], tool_choice=choice, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in found]
        pieces = [call.function for delta in deltas for call in delta.tool_calls or ()]
        name, text = pieces[0].name, "".join(piece.arguments or "" for piece in pieces)
    else:
        (call, *_) = found.choices[0].message.tool_calls
        name, text = call.function.name, call.function.arguments
    assert name == "get_weather"
    assert {*json.loads(text)} == {"city"}


def continuing(client: OpenAI, begun: Any, **more: Any) -> Any:
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    return ask(client, QUESTION, begun, model=DEMO, extra_body=extra, **more)


def test_a_message_is_continued_streamed_and_not(client: OpenAI) -> None:
    whole = ask(client, QUESTION, model=DEMO).choices[0].message.content
    assert whole.startswith(f"{BEGUN['content']} Paris")
    (choice,) = continuing(client, BEGUN).choices
    assert choice.message.content == whole.removeprefix(BEGUN["content"])
    chunks = continuing(client, BEGUN, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content


def test_json_is_continued_to_its_end(client: OpenAI) -> None:
    begun = '{"country": "Fra'
    (choice,) = continuing(
        client, {"role": "assistant", "content": begun}, response_format=FORMAT
    ).choices
    assert choice.finish_reason == "stop"
    assert {*json.loads(begun + choice.message.content)} == {"country", "capital"}


def test_a_whole_value_is_continued_by_nothing(client: OpenAI) -> None:
    whole = '{"country": "France", "capital": "Paris"}'
    (choice,) = continuing(
        client, {"role": "assistant", "content": whole}, response_format=FORMAT
    ).choices
    assert (choice.message.content.strip(), choice.finish_reason) == ("", "stop")


def test_text_that_begins_no_such_value_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="not the beginning of such an answer"):
        continuing(client, BEGUN, response_format=FORMAT)


WORDS = "the quick brown fox jumps over the lazy dog " * 20


def cached(server: LiveServer, prompt: str = WORDS, key: str = "none", **body: Any) -> int:
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, **body}
    with server.http() as http:
        answer = http.post(
            "/v1/completions", json=asked, headers={"Authorization": f"Bearer {key}"}
        )
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"])


@pytest.fixture
def config(tiny_path: Path) -> dict[str, Any]:
    return {"models": {"tiny": {"source": str(tiny_path)}}}


def test_a_restart_of_the_server(tmp_path: Path, config: dict[str, Any]) -> None:
    server = start(tmp_path, config)
    assert cached(server) == 0
    stop(server)
    with serving(tmp_path, config) as server:
        assert cached(server, WORDS + "again") > 800
        assert server.gauge("mlx_server_disk_cache_hits_total") == 1
        assert server.gauge("mlx_server_disk_cache_read_bytes_total") > 0
        assert server.gauge("mlx_server_disk_cache_bytes") > 0
        folder = tmp_path / "data" / "prompts"
        assert sum(e.stat().st_blocks * 512 for e in folder.iterdir() if e.name != "lock") > 0


def test_the_death_of_the_engine(tmp_path: Path, config: dict[str, Any]) -> None:
    with serving(tmp_path, config) as server:
        assert cached(server) == 0
        prompts = tmp_path / "data" / "prompts"
        eventually(lambda: server.gauge("mlx_server_disk_cache_bytes") > 0, "it is on the disk")
        eventually(lambda: len(list(prompts.iterdir())) > 4, "the prompt is a file")
        server.engine.kill()

        def answers() -> bool:
            try:
                return cached(server) > 0
            except (AssertionError, httpx.HTTPError):
                return False

        eventually(answers, "the engine is back", 30)
        assert server.gauge("mlx_server_disk_cache_hits_total") >= 1


def test_what_is_not_to_be_stored_and_other_keys(tmp_path: Path, config: dict[str, Any]) -> None:
    config = {**config, "server": {"api_keys": ["one", "other"]}}
    first = start(tmp_path, config)
    assert cached(first, key="one") == 0
    assert cached(first, "secret " * 100, "one", store=False) == 0
    stop(first)
    with serving(tmp_path, config) as server:
        assert cached(server, key="other") == 0
        assert cached(server, "secret " * 100, "one", store=False) == 0
        assert cached(server, key="one") > 800
