"""Answers as clients of other servers read them: the name of a thought, and what to ask again."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.live.server import LiveServer, serving

CHAT = "/v1/chat/completions"
THINKER, BROKEN = "thinker", "broken"
THOUGHT = "Let me see, step by step."
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt"}}\n</tool_call>'
ENTRIES: list[dict[str, Any]] = [
    {"match": "regex:Read", "output": f"<think>\n{THOUGHT}\n</think>\n\n{CALL}"},
    {"last": "Some text.", "output": f"<think>\n{THOUGHT}\n</think>\n\nIt is so."},
    {"match": "regex:.", "output": f"<think>\n{THOUGHT}\n</think>\n\nIt is so."},
]

Json = dict[str, Any]

ALIASES = {"reasoning": "reasoning_content", "reasoning_text": "reasoning_content"}
"""Names that clients in Rust take for one field: two of them in one object are an error there."""

HI = [{"role": "user", "content": "Well?"}]
READ: Json = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads a file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module", params=["reasoning_content", "reasoning"])
def field(request: pytest.FixtureRequest) -> str:
    """The name that the owner of the server has chosen for a thought."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(field: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("bodies")
    (folder / "said.jsonl").write_text("\n".join(map(json.dumps, ENTRIES)), "utf-8")
    replay = {"source": "replay:said.jsonl", "family": "qwen3"}
    (folder / BROKEN).mkdir()
    (folder / BROKEN / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    models = {THINKER: replay, BROKEN: {"source": f"./{BROKEN}"}}
    config = {"models": models, "server": {"reasoning_field": field}}
    with serving(folder, config) as server:
        yield server
        assert "Traceback" not in server.log


def post(http: httpx.Client, **asked: Any) -> httpx.Response:
    response = http.post(CHAT, json={"model": THINKER, **asked})
    assert response.status_code == 200, response.text
    return response


def chunks(response: httpx.Response) -> list[Json]:
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [
        json.loads(event.removeprefix("data: "), object_pairs_hook=fields) for event in events[:-2]
    ]


def fields(pairs: list[tuple[str, Any]]) -> Json:
    """An object, which no two of its names make ambiguous."""
    names = [ALIASES.get(name, name) for name, _ in pairs]
    assert len(set(names)) == len(names), names
    return dict(pairs)


def test_a_thought_has_one_name(http: httpx.Client, field: str) -> None:
    asked = {"messages": [{"role": "user", "content": "Read it."}], "tools": [READ]}
    deltas = [each["choices"][0]["delta"] for each in chunks(post(http, **asked, stream=True))]
    assert "".join(each.get(field, "") for each in deltas).strip() == THOUGHT
    message = json.loads(post(http, **asked).text, object_pairs_hook=fields)["choices"][0][
        "message"
    ]
    assert message[field].strip() == THOUGHT
    assert message["tool_calls"][0]["function"]["name"] == "read"


def test_a_model_that_is_no_use_is_not_asked_again(http: httpx.Client) -> None:
    """OpenAI's and Anthropic's clients repeat what failed with a 500, unless it says otherwise."""
    response = http.post(CHAT, json={"model": BROKEN, "messages": HI})
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
