"""Bodies as clients send them, whose makers serve other models, and chunks as they read them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.live.server import LiveServer, serving

CHAT = "/v1/chat/completions"
THINKER = "thinker"
THOUGHT = "Let me see, step by step."
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt"}}\n</tool_call>'
ENTRIES: list[dict[str, Any]] = [
    {"match": "regex:Read", "output": f"<think>\n{THOUGHT}\n</think>\n\n{CALL}"},
    {"last": "Some text.", "output": f"<think>\n{THOUGHT}\n</think>\n\nIt is so."},
    {"match": "regex:.", "output": f"<think>\n{THOUGHT}\n</think>\n\nIt is so."},
]
IGNORED = "x-mlx-server-ignored"

Json = dict[str, Any]

ALIASES = {"reasoning": "reasoning_content", "reasoning_text": "reasoning_content"}
"""Names that clients in Rust take for one field: two of them in one object are an error there."""

HI = [{"role": "user", "content": "Well?"}]
MARK = {"cache_control": {"type": "ephemeral"}}
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
CALLED: Json = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "read", "arguments": '{"path": "a.txt"}'},
}
ROUND: list[Json] = [
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Some text."},
]
STREAMED: Json = {"stream": True, "stream_options": {"include_usage": True}}

BODIES: dict[str, tuple[Json, str | None]] = {
    "LM Studio's examples": (
        {"messages": HI, "temperature": 0.7, "max_tokens": -1, "stream": False},
        None,
    ),
    "clients of vLLM": (
        {"messages": HI, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
        None,
    ),
    "Roo Code": (
        {
            "temperature": 0,
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "You code.", **MARK}]},
                {"role": "user", "content": [{"type": "text", "text": "Well?", **MARK}]},
            ],
            "tools": [{**READ, "function": {**READ["function"], "strict": True}}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            **STREAMED,
        },
        "messages.content.cache_control",
    ),
    "Zed": (
        {
            "messages": [
                {"role": "system", "content": "You code."},
                {"role": "user", "content": [{"type": "text", "text": "Look."}]},
                {"role": "assistant", "tool_calls": [CALLED], "reasoning_content": THOUGHT},
                {
                    "role": "tool",
                    "content": [{"type": "text", "text": "Some text."}],
                    "tool_call_id": "call_1",
                },
            ],
            "max_completion_tokens": 50,
            "temperature": 1.0,
            "parallel_tool_calls": False,
            "tools": [READ],
            "prompt_cache_key": "thread-1",
            **STREAMED,
        },
        None,
    ),
    "goose": (
        {
            "messages": [
                {"role": "system", "content": "You code."},
                *HI,
                {**ROUND[0], "reasoning_content": THOUGHT},
                ROUND[1],
            ],
            "tools": [READ],
            "max_tokens": 50,
            **STREAMED,
        },
        None,
    ),
    "the AI SDK": (
        {
            "max_tokens": 50,
            "messages": [
                *HI,
                {"role": "assistant", "content": "", "reasoning_content": THOUGHT, **ROUND[0]},
                ROUND[1],
            ],
            "tools": [READ],
            "thinking": {"type": "enabled", "clear_thinking": False},
            **STREAMED,
        },
        "thinking.clear_thinking, thinking.type",
    ),
    "clients of OpenRouter": (
        {
            "messages": [
                *HI,
                {**ROUND[0], "reasoning": THOUGHT, "reasoning_details": [{"text": THOUGHT}]},
                ROUND[1],
            ],
            "tools": [READ],
            "reasoning": {"max_tokens": 10, "exclude": False},
            "include_reasoning": True,
            "provider": {"sort": "throughput"},
        },
        "provider, extra_content",
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("bodies")
    (folder / "said.jsonl").write_text("\n".join(map(json.dumps, ENTRIES)), "utf-8")
    replay = {"source": "replay:said.jsonl", "family": "qwen3"}
    config = {"models": {THINKER: replay}, "server": {"reasoning_field": "reasoning_content"}}
    with serving(folder, config) as server:
        yield server
        assert "Traceback" not in server.log
        assert " ERROR " not in server.log


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


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


@pytest.mark.parametrize("name", BODIES)
def test_it_is_answered(http: httpx.Client, name: str) -> None:
    body, ignored = BODIES[name]
    response = post(http, **body)
    listed = response.headers.get(IGNORED)
    assert set((listed or "").split(", ")) == set((ignored or "").split(", "))


def test_a_thought_has_one_name(http: httpx.Client) -> None:
    asked = {"messages": [{"role": "user", "content": "Read it."}], "tools": [READ]}
    deltas = [each["choices"][0]["delta"] for each in chunks(post(http, **asked, stream=True))]
    assert "".join(each.get("reasoning_content", "") for each in deltas).strip() == THOUGHT
    message = json.loads(post(http, **asked).text, object_pairs_hook=fields)["choices"][0][
        "message"
    ]
    assert message["reasoning_content"].strip() == THOUGHT
    assert message["tool_calls"][0]["function"]["name"] == "read"


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"reasoning_field": "reasoning"}, {"reasoning"}),
        ({}, {"reasoning_content", "reasoning"}),
    ],
)
def test_the_owner_names_the_field(
    tmp_path_factory: pytest.TempPathFactory, settings: dict[str, str], names: set[str]
) -> None:
    folder = tmp_path_factory.mktemp("named")
    (folder / "said.jsonl").write_text("\n".join(map(json.dumps, ENTRIES)), "utf-8")
    replay = {"source": "replay:said.jsonl", "family": "qwen3"}
    config = {"models": {THINKER: replay}, "server": settings}
    with serving(folder, config) as server, server.http() as http:
        (choice,) = post(http, messages=HI).json()["choices"]
    found = {name for name in choice["message"] if name.startswith("reasoning")}
    assert found == names


def test_a_model_that_is_no_use_is_not_asked_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """OpenAI's and Anthropic's clients repeat what failed with a 500, unless it says otherwise."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    config = {"models": {THINKER: {"source": str(folder / "model")}}}
    with serving(folder, config) as server, server.http() as http:
        response = http.post(CHAT, json={"model": THINKER, "messages": HI})
        assert response.status_code == 500
        assert response.headers["x-should-retry"] == "false"
