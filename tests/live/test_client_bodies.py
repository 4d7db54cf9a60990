"""Answers as clients of other servers read them: the name of a thought, and what to ask again."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.live.server import LiveServer, serving

CHAT = "/v1/chat/completions"
THOUGHT = "Let me see, step by step."
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt"}}\n</tool_call>'
SAID = {"output": f"<think>\n{THOUGHT}\n</think>\n\n{CALL}"}
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}

ALIASES = {"reasoning": "reasoning_content", "reasoning_text": "reasoning_content"}
"""Names that clients in Rust take for one field: two of them in one object are an error there."""


@pytest.fixture(scope="module", params=["reasoning_content", "reasoning"])
def field(request: pytest.FixtureRequest) -> str:
    """The name that the owner of the server has chosen for a thought."""
    return str(request.param)


@pytest.fixture(scope="module")
def server(field: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("bodies")
    (folder / "said.jsonl").write_text(json.dumps(SAID), "utf-8")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    thinker = {"source": "replay:said.jsonl", "family": "qwen3"}
    models = {"thinker": thinker, "broken": {"source": "./broken"}}
    with serving(folder, {"models": models, "server": {"reasoning_field": field}}) as server:
        yield server
        assert "Traceback" not in server.log


def posted(http: httpx.Client, status: int, **more: Any) -> httpx.Response:
    asked = {"messages": [{"role": "user", "content": "Read it."}], "tools": [READ], **more}
    response = http.post(CHAT, json=asked)
    assert response.status_code == status, response.text
    return response


def choice(text: str) -> Any:
    """That of a body or a chunk, of which no two names make an object ambiguous."""

    def fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [ALIASES.get(name, name) for name, _ in pairs]
        assert len(set(names)) == len(names), names
        return dict(pairs)

    return json.loads(text, object_pairs_hook=fields)["choices"][0]


def test_a_thought_has_one_name(http: httpx.Client, field: str) -> None:
    *chunks, done, _ = posted(http, 200, model="thinker", stream=True).text.split("\n\n")
    assert done == "data: [DONE]"
    deltas = [choice(chunk.removeprefix("data: "))["delta"] for chunk in chunks]
    assert "".join(each.get(field, "") for each in deltas).strip() == THOUGHT
    message = choice(posted(http, 200, model="thinker").text)["message"]
    assert message[field].strip() == THOUGHT
    assert message["tool_calls"][0]["function"]["name"] == "read"


def test_a_model_that_is_no_use_is_not_asked_again(http: httpx.Client) -> None:
    """OpenAI's and Anthropic's clients repeat what failed with a 500, unless it says otherwise."""
    assert posted(http, 500, model="broken").headers["x-should-retry"] == "false"
