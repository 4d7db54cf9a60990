"""What agents send again with every turn: a history is answered, and the header names what was left
out."""

import base64
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_server.models.tokenizer import Tokenizer
from tests.api import wire
from tests.api.wire import MODEL, Json, ScriptedEngine

IGNORED = "x-mlx-server-ignored"

pytestmark = pytest.mark.usefixtures("_as_before")


@pytest.fixture(scope="module")
def client(tiny_path: Path, engine: ScriptedEngine) -> Iterator[TestClient]:
    with wire.client(tiny_path, engine, show_prompts=True) as client:
        yield client


@pytest.fixture(scope="module")
def refusing(tiny_path: Path) -> Iterator[TestClient]:
    with wire.client(tiny_path, ScriptedEngine(), images="refuse") as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(tiny_path: Path) -> Tokenizer:
    return Tokenizer(tiny_path / "tokenizer.json")


def user(content: Any) -> list[Json]:
    return [{"role": "user", "content": content}]


TEXT_PLACES: dict[str, Any] = {
    "/v1/chat/completions": lambda text: {"messages": user(text)},
    "/v1/chat/completions/render": lambda text: {"messages": user(text)},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/messages": lambda text: {"messages": user(text), "max_tokens": 4},
    "/v1/messages/count_tokens": lambda text: {"messages": user(text)},
    "/v1/responses": lambda text: {"input": user(text)},
    "/v1/responses/input_tokens": lambda text: {"input": user(text)},
    "/v1/conversations": lambda text: {"items": user(text)},
    "/api/chat": lambda text: {"messages": user(text), "stream": False},
    "/api/generate": lambda text: {"prompt": text, "stream": False},
    "/generate": lambda text: {"messages": user(text)},
    "/tokenize": lambda text: {"messages": user(text)},
}


@pytest.mark.slow
@pytest.mark.parametrize("path", TEXT_PLACES)
@pytest.mark.parametrize("half", ["x\ud83d", "\ude00x", "\ude00\ud83d", '{"a": "\ud83d"}'])
def test_half_of_a_surrogate_pair_is_replaced(client: TestClient, path: str, half: str) -> None:
    body = {} if path == "/v1/conversations" else {"model": MODEL}
    answer = client.post(path, content=json.dumps(body | TEXT_PLACES[path](half)))
    assert answer.status_code == 200, answer.text
    assert "lone_surrogates" in answer.headers[IGNORED]
    whole = client.post(path, json=body | TEXT_PLACES[path]("x🙂"))
    assert whole.status_code == 200
    assert "lone_surrogates" not in whole.headers.get(IGNORED, "")


def test_the_prompt_has_a_replacement_character(
    client: TestClient, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    arguments = {"\udfffz": "x\ud83dy"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    talk = [*user("\ud83d\ude42\ud83d"), {"role": "assistant", "tool_calls": [call]}]
    body = {"model": MODEL, "messages": talk}
    assert client.post("/v1/chat/completions", content=json.dumps(body)).status_code == 200
    prompt = tokenizer.raw(engine.taken[-1].prompt)
    assert "\n🙂\ufffd<" in prompt
    assert '{"\ufffdz": "x\ufffdy"}' in prompt


def test_of_keys_that_become_the_same_the_last_one_counts(
    client: TestClient, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    arguments = {"<1>a": 1, "b": 2, "<2>a": 3}
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    body = json.dumps({"model": MODEL, "messages": [*user("hi"), assistant(None, call)]})
    body = body.replace("<1>", r"\ud83d").replace("<2>", r"\udfff")
    answer = client.post(CHAT, content=body)
    assert answer.status_code == 200, answer.text
    assert '{"\ufffda": 3, "b": 2}' in tokenizer.raw(engine.taken[-1].prompt)
    twice = client.post(CHAT, content=body.replace('"b": 2', '"b": 2, "b": 2'))
    assert (twice.status_code, "occurs twice" in twice.text) == (400, True)


def test_half_of_a_pair_over_a_web_socket(client: TestClient) -> None:
    with suppress(*wire.CANCELLED), client.websocket_connect("ws://localhost/v1/responses") as line:
        asked = {"type": "response.create", "model": MODEL, "input": "x\ud83d"}
        line.send_text(json.dumps(asked))
        while (event := line.receive_json())["type"] not in ("response.completed", "error"):
            pass
    assert event["type"] == "response.completed", event
    assert event["response"]["mlx_server"]["ignored"] == ["lone_surrogates"]


PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x02\x80\x00\x00\x01\xe0" + bytes(40)
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"
LINE = "[image: image/png, 640x480, not shown: this model reads only text]"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
FUNCTION: Json = {"name": "f", "arguments": "{}"}
CALL: Json = {"id": "c", "type": "function", "function": FUNCTION}
ITEM: Json = {"type": "function_call", "call_id": "c", **FUNCTION}
USE: Json = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
IMAGE: Json = {"type": "image_url", "image_url": {"url": URL}}
BLOCK: Json = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": DATA},
}
ZIP = "data:application/zip;base64,UEsDBA=="


def chat(*messages: Any, **more: Any) -> Json:
    return {"messages": [*user("hi"), *messages], "max_tokens": 4, **more}


def assistant(content: Any = None, *calls: Any, **more: Any) -> Json:
    return {"role": "assistant", "content": content, "tool_calls": [*calls], **more}


def result(content: Any, **more: Any) -> Json:
    return {"role": "tool", "tool_call_id": "c", "content": content, **more}


def anthropic(*content: Any, after: Any = ()) -> Json:
    talk = [*user("hi"), *after, *user([*content])]
    return {"messages": talk, "max_tokens": 4}


def responses(*items: Any) -> Json:
    return {"input": [*user("hi"), *items], "store": False, "max_output_tokens": 4}


def ollama(*messages: Any) -> Json:
    return {"messages": [*user("hi"), *messages], "stream": False}


def answered(content: Any) -> Json:
    return anthropic(
        {"type": "tool_result", "tool_use_id": "c", "content": content},
        after=[{"role": "assistant", "content": [USE]}],
    )


HISTORIES: dict[str, tuple[str, Json, str, str]] = {
    # the path, the body, a text of the prompt, and what the header names
    "an image": (CHAT, chat(*user([IMAGE])), LINE, "messages.content.image_url"),
    "of a tool": (
        CHAT,
        chat(assistant(None, CALL), result([{"type": "text", "text": "shot"}, IMAGE])),
        f"shot\n{LINE}",
        "messages.content.image_url",
    ),
    "of an assistant": (CHAT, chat(assistant([IMAGE])), LINE, "messages.content.image_url"),
    "by its address": (
        CHAT,
        chat(*user([{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}])),
        "[image: https://a.b/c.png, not shown: this model reads only text]",
        "messages.content.image_url",
    ),
    "of no base64": (
        CHAT,
        chat(*user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}])),
        "[image: image/png, not shown: this model reads only text]",
        "messages.content.image_url",
    ),
    "of no known scheme": (
        CHAT,
        chat(*user([{"type": "image_url", "image_url": "gopher://x"}])),
        "[image, not shown: this model reads only text]",
        "messages.content.image_url",
    ),
    "a sound": (
        CHAT,
        chat(*user([{"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}])),
        "[audio: wav, not shown: this model reads only text]",
        "messages.content.input_audio",
    ),
    "a video": (
        CHAT,
        chat(*user([{"type": "video_url", "video_url": {"url": "https://a.b/c"}}])),
        "[video: https://a.b/c, not shown: this model reads only text]",
        "messages.content.video_url",
    ),
    "an archive": (
        CHAT,
        chat(*user([{"type": "file", "file": {"filename": "a.zip", "file_data": ZIP}}])),
        "[file: a.zip application/zip, not shown: it is neither text nor PDF]",
        "messages.content.file",
    ),
    "a file elsewhere": (
        CHAT,
        chat(*user([{"type": "file", "file": {"file_id": "file-1"}}])),
        "[file: file-1, not shown: this server keeps no files and fetches none]",
        "messages.content.file",
    ),
    "a broken PDF": (
        CHAT,
        chat(
            *user([{"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0="}}])
        ),
        "[file: application/pdf, not shown: the PDF file is damaged]",
        "messages.content.file",
    ),
    "a thought in parts": (
        CHAT,
        chat(assistant([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ab"}])),
        "assistant\nab",
        "",
    ),
    "an encrypted thought": (
        CHAT,
        chat(
            assistant([{"type": "redacted_thinking", "data": "hm"}, {"type": "text", "text": "ab"}])
        ),
        "assistant\nab",
        "messages.content.redacted_thinking",
    ),
    "reasoning as an object": (CHAT, chat(assistant("ab", reasoning={"text": "x"})), "ab", ""),
    "details of reasoning": (
        CHAT,
        chat(assistant("ab", reasoning_details=[{"type": "reasoning.encrypted", "data": "x"}])),
        "assistant\nab",
        "messages.reasoning_details",
    ),
    "a call among parts": (
        CHAT,
        chat(assistant([{"type": "text", "text": "ab"}, USE], CALL)),
        "assistant\nab",
        "messages.content.tool_use",
    ),
    "a role of a critic": (
        CHAT,
        chat({"role": "critic", "content": "ab"}),
        "user\nab",
        "messages.role",
    ),
    "a role of Gemini": (CHAT, chat({"role": "model", "content": "ab"}), "assistant\nab", ""),
    "no content": (CHAT, chat(assistant(None), {"role": "user"}, *user([])), "user\n", ""),
    "a result without a call": (CHAT, chat(result("ab")), "ab", ""),
    "a result without an id": (
        CHAT,
        chat(assistant(None, CALL), {"role": "tool", "content": "ab"}),
        "ab",
        "",
    ),
    "a call without a result": (CHAT, chat(assistant(None, CALL), *user("ab")), "user\nab", ""),
    "two calls of one id": (CHAT, chat(assistant(None, CALL, CALL), result("ab")), "ab", ""),
    "ids that are numbers": (
        CHAT,
        chat(assistant(None, {**CALL, "id": 5}), result("ab", tool_call_id=5)),
        "ab",
        "",
    ),
    "numbers in Responses": (
        RESPONSES,
        responses(
            {**ITEM, "call_id": 5},
            {"type": "function_call_output", "call_id": 5, "output": "ab"},
        ),
        "ab",
        "",
    ),
    "a number of Ollama's": (
        "/api/chat",
        ollama({"role": "tool", "tool_call_id": 5, "content": "ab"}),
        "ab",
        "",
    ),
    "a use without an id or a name": (
        MESSAGES,
        anthropic(
            {"type": "tool_result", "tool_use_id": 5, "content": "ab"},
            after=[
                {
                    "role": "assistant",
                    "content": [{"type": "redacted_thinking"}, {"type": "tool_use", "name": ""}],
                }
            ],
        ),
        "unknown",
        "messages.content.redacted_thinking",
    ),
    "a thought of null": (
        MESSAGES,
        anthropic(
            {"type": "text", "text": "ab"},
            after=[{"role": "assistant", "content": [{"type": "thinking", "thinking": None}]}],
        ),
        "ab",
        "messages.content.signature",
    ),
    "a custom call of nulls": (
        CHAT,
        chat(assistant(None, {"id": None, "type": "custom", "custom": None})),
        "unknown",
        "",
    ),
    "thoughts in unknown parts": (
        RESPONSES,
        responses(
            {
                "type": "reasoning",
                "summary": [{"type": "hologram", "x": 1}, {"type": "title", "text": "hm"}],
                "content": "ab",
            },
            *user("cd"),
        ),
        "cd",
        "input.summary.hologram",
    ),
    "results and arguments as they are": (
        CHAT,
        chat(
            assistant(None, {"id": "c", "function": {"name": 5, "arguments": True}}),
            result({"a": [1, None]}),
        ),
        'tool\n{"a": [1, null]}',
        "",
    ),
    "a number in Anthropic's result": (MESSAGES, answered(5), "tool\n5", ""),
    "an object in it": (MESSAGES, answered([{"a": 1}, "b"]), 'tool\n{"a": 1}\nb', ""),
    "a thought that is no text": (
        MESSAGES,
        anthropic(
            {"type": "text", "text": 5},
            after=[{"role": "assistant", "content": [{"type": "tool_use", "input": 5}]}],
        ),
        "user\n5",
        "",
    ),
    "a document without a source": (
        MESSAGES,
        anthropic({"type": "document", "title": "T"}),
        "hi\nT",
        "messages.content.source",
    ),
    "a system prompt in texts": (
        MESSAGES,
        {**anthropic({"type": "text", "text": "x"}), "system": ["a", "b"]},
        "system\na\nb",
        "",
    ),
    "an object as Codex's output": (
        RESPONSES,
        responses({"type": "function_call_output", "call_id": "c", "output": {"a": 1}}),
        '{"a": 1}',
        "",
    ),
    "items that another server keeps": (
        RESPONSES,
        responses({"type": "item_reference", "id": "rs_none"}, {"id": "msg_none"}, *user("ab")),
        "user\nhi<|im_end|>\n<|im_start|>user\nab",
        "input.item_reference",
    ),
    "a phase of the future": (
        RESPONSES,
        responses({"role": "assistant", "content": "ab", "phase": "musing", "id": 5}),
        "assistant\nab",
        "input.phase",
    ),
    "parts of Ollama's": (
        "/api/chat",
        ollama({"role": "tool", "tool_name": 5, "content": [{"type": "text", "text": "ab"}]}),
        "tool\nab",
        "",
    ),
    "a list as arguments of Ollama's": (
        "/api/chat",
        ollama({"role": "assistant", "tool_calls": [{"function": {"arguments": [1]}}]}),
        "unknown",
        "",
    ),
    "a call without a name": (
        CHAT,
        chat(assistant(None, {"id": "c", "function": {"name": "", "arguments": "{}"}})),
        "unknown",
        "",
    ),
    "a call without a function": (
        CHAT,
        chat(assistant(None, {"id": "c", "type": "mcp", "mcp": {}})),
        "unknown",
        "messages.tool_calls.mcp",
    ),
    "a call of both forms": (
        CHAT,
        chat(assistant(None, CALL, function_call={"name": "g", "arguments": "{}"})),
        '"f"',
        "messages.function_call",
    ),
    "arguments that are no JSON": (
        CHAT,
        chat(assistant(None, {"id": "c", "function": {"name": "f", "arguments": '{"a": '}})),
        '{"a": ',
        "",
    ),
    "arguments of any form": (
        RESPONSES,
        responses({**ITEM, "arguments": [["a"], "b"]}),
        '[["a"], "b"]',
        "",
    ),
    "a name of any characters": (
        CHAT,
        chat(assistant(None, {"id": "c", "function": {"name": "a b/ü" * 99, "arguments": "{}"}})),
        "a b/ü",
        "",
    ),
    "an image of Anthropic's": (MESSAGES, anthropic(BLOCK), LINE, "messages.content.image"),
    "of Anthropic's tool": (
        MESSAGES,
        answered([{"type": "text", "text": "shot"}, BLOCK]),
        f"shot\n{LINE}",
        "messages.content.content.image",
    ),
    "a document elsewhere": (
        MESSAGES,
        anthropic({"type": "document", "title": "T", "source": {"type": "file", "file_id": "a"}}),
        "T\n[file: a, not shown: this server keeps no files and fetches none]",
        "messages.content.document",
    ),
    "an image in a document": (
        MESSAGES,
        anthropic({"type": "document", "source": {"type": "content", "content": [BLOCK]}}),
        LINE,
        "messages.content.document.image",
    ),
    "a block of the future": (
        MESSAGES,
        anthropic({"type": "hologram", "x": 1}, {"type": "note", "text": "ab"}),
        "ab",
        "messages.content.hologram",
    ),
    "a result without a use": (
        MESSAGES,
        anthropic({"type": "tool_result", "tool_use_id": "z", "content": "ab"}),
        "ab",
        "",
    ),
    "a use in the user's message": (
        MESSAGES,
        anthropic(USE, {"type": "text", "text": "ab"}),
        "ab",
        "",
    ),
    "a null in Anthropic's": (MESSAGES, anthropic(after=[{"role": "assistant"}]), "assistant", ""),
    "an image of Responses": (
        RESPONSES,
        responses(*user([{"type": "input_image", "image_url": URL}])),
        LINE,
        "input.content.input_image",
    ),
    "of Codex's tool": (
        RESPONSES,
        responses(
            ITEM,
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": URL}],
            },
        ),
        LINE,
        "input.output.input_image",
    ),
    "an output without a call": (
        RESPONSES,
        responses({"type": "function_call_output", "call_id": "z", "output": "ab"}),
        "ab",
        "",
    ),
    "an item of the future": (
        RESPONSES,
        responses({"type": "hologram_call", "id": "h"}, *user("ab")),
        "ab",
        "input.hologram_call",
    ),
    "a role in Responses": (
        RESPONSES,
        responses({"role": "critic", "content": "ab"}),
        "ab",
        "input.role",
    ),
    "a summary of another server": (
        RESPONSES,
        responses({"type": "compaction", "encrypted_content": "x"}),
        "hi",
        "input.compaction",
    ),
    "an MCP call of no server": (
        RESPONSES,
        responses({"type": "mcp_call", "name": "roll", "arguments": "{}", "output": "4"}),
        "roll",
        "",
    ),
    "a list of tools of no server": (RESPONSES, responses({"type": "mcp_list_tools"}), "hi", ""),
    "a call whose type is a number": (
        CHAT,
        chat(assistant(None, {"id": "c", "type": 5, "function": {"name": "roll"}})),
        "roll",
        "",
    ),
    "an approval without a request": (
        RESPONSES,
        responses({"type": "mcp_approval_response", "approval_request_id": "x", "approve": True}),
        "hi",
        "input.approval_request_id",
    ),
    "an approval of a server that has gone": (
        RESPONSES,
        responses(
            {"type": "mcp_approval_request", "id": "x", "server_label": "dice", "name": "roll"},
            {"type": "mcp_approval_response", "approval_request_id": "x", "approve": True},
        ),
        "hi",
        "input.approval_request_id",
    ),
    "a message that is only a text": (CHAT, chat("ab", *user("hi")), "ab", ""),
    "a message that is null": (CHAT, chat(None, *user("ab")), "ab", "messages"),
    "a message without a role": (CHAT, chat({"content": "ab"}), "ab", "messages.role"),
    "a role that is a number": (CHAT, chat({"role": 5, "content": "ab"}), "ab", "messages.role"),
    "a call without a list": (
        CHAT,
        chat(assistant("ab", CALL) | {"tool_calls": CALL}),
        '"name": "f"',
        "",
    ),
    "calls that are a text": (
        CHAT,
        chat(assistant("ab") | {"tool_calls": "none"}),
        "ab",
        "messages.tool_calls",
    ),
    "a function that is a text": (
        CHAT,
        chat(assistant("ab", CALL | {"function": "f"}, None)),
        "ab",
        "messages.tool_calls, messages.tool_calls.function",
    ),
    "details that are none": (
        CHAT,
        chat(
            assistant("ab", CALL | {"extra_content": [1]})
            | {"reasoning_details": ["x"], "reasoning": 5}
        ),
        "ab",
        "messages.reasoning, messages.reasoning_details, messages.tool_calls.extra_content",
    ),
    "a system part of the future": (
        MESSAGES,
        {**anthropic("hi"), "system": [{"type": "hologram"}, {"type": "text", "text": "ab"}]},
        "ab",
        "system.hologram",
    ),
    "references to tools that are none": (
        MESSAGES,
        anthropic(
            {"type": "tool_search_tool_result", "content": "x"}, {"type": "text", "text": "ab"}
        ),
        "ab",
        "messages.content, messages.content.content",
    ),
    "an item that is only a text": (RESPONSES, responses("ab"), "ab", ""),
    "an item without anything": (RESPONSES, responses({}), "hi", "input"),
    "an item without a role": (
        RESPONSES,
        responses({"role": None, "content": "ab"}),
        "ab",
        "input.role",
    ),
    "a reference to a number": (
        RESPONSES,
        responses({"type": "item_reference", "id": 5}),
        "hi",
        "input, input.id",
    ),
    "a tool that is none": (
        RESPONSES,
        responses({"type": "additional_tools", "tools": [{"type": "hologram"}]}),
        "hi",
        "input.tools.hologram",
    ),
    "a message of Ollama's that is null": (
        "/api/chat",
        ollama(None, {"role": "user", "content": "ab"}),
        "ab",
        "messages",
    ),
    "a lone image of Ollama's": (
        "/api/chat",
        ollama({"role": "user", "content": "ab", "images": DATA}),
        f"ab\n{LINE}",
        "messages.images",
    ),
    "an image of Ollama's": (
        "/api/chat",
        ollama({"role": "user", "content": "ab", "images": [DATA]}),
        f"ab\n{LINE}",
        "messages.images",
    ),
    "of Ollama's tool": (
        "/api/chat",
        ollama({"role": "tool", "tool_name": "f", "content": "shot", "images": [DATA, URL]}),
        f"shot\n{LINE}\n{LINE}",
        "messages.images",
    ),
    "an image to generate from": (
        "/api/generate",
        {"prompt": "ab", "images": [DATA], "stream": False},
        f"ab\n{LINE}",
        "images",
    ),
    "an image beside a raw prompt": (
        "/api/generate",
        {"prompt": "ab", "images": [DATA], "stream": False, "raw": True},
        "ab",
        "images",
    ),
    "an image for native": (
        "/generate",
        chat(*user([IMAGE])),
        LINE,
        "messages.content.image_url",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_is_answered(
    client: TestClient, engine: ScriptedEngine, tokenizer: Tokenizer, name: str
) -> None:
    path, body, shown, ignored = HISTORIES[name]
    answer = client.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    assert shown in tokenizer.raw(engine.taken[-1].prompt)
    named = answer.headers.get(IGNORED, "").split(", ")
    assert ", ".join(sorted(each for each in named if each != "max_tokens")) == ignored


def test_only_so_much_of_a_history_is_left_out(client: TestClient) -> None:
    for length, status in ((1_000, 200), (20_000, 400)):
        body = {"model": MODEL, **chat(*([None] * length))}
        assert client.post(CHAT, json=body).status_code == status


def test_a_message_keeps_its_text_whatever_number_of_its_calls_is_wrong(
    client: TestClient, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    message = {"role": "assistant", "content": "Let me look.", "tool_calls": [5] * 1000}
    answer = client.post(CHAT, json={"model": MODEL, **chat(message, *user("hi"))})
    assert answer.status_code == 200, answer.text
    assert "Let me look." in tokenizer.raw(engine.taken[-1].prompt)
    assert answer.headers[IGNORED] == "messages.tool_calls"


def test_what_is_left_out_makes_no_room_for_more_items(client: TestClient) -> None:
    items = [*user("hi") * 21, None]
    assert client.post("/v1/conversations", json={"items": items}).status_code == 400
    assert client.post("/v1/conversations", json={"items": items[2:]}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/v1/messages/count_tokens", anthropic(BLOCK), "messages.content.image"),
        (
            "/v1/responses/input_tokens",
            HISTORIES["an image of Responses"][1],
            "input.content.input_image",
        ),
        ("/tokenize", {"messages": user([IMAGE])}, "messages.content.image_url"),
        ("/v1/chat/completions/render", chat(*user([IMAGE])), "messages.content.image_url"),
    ],
)
def test_an_image_is_counted_as_its_line(
    client: TestClient, path: str, body: Json, ignored: str
) -> None:
    body = {name: body[name] for name in ("messages", "input") if name in body}
    answer = client.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == ignored


def test_a_stored_chain_with_an_image_goes_on(
    client: TestClient, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    asked = {"model": MODEL, "input": user([{"type": "input_image", "image_url": URL}])}
    first = client.post(RESPONSES, json=asked).json()
    made = client.post("/v1/conversations", json={"items": asked["input"]}).json()
    for before in ({"previous_response_id": first["id"]}, {"conversation": made["id"]}):
        answer = client.post(RESPONSES, json={"model": MODEL, "input": "and now?", **before})
        assert answer.status_code == 200, answer.text
        assert LINE in tokenizer.raw(engine.taken[-1].prompt)
        place = f"{next(iter(before))}.content.input_image"
        assert answer.headers[IGNORED] == place.replace("conversation.", "previous_response_id.")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, chat(*user([IMAGE])), 400),
        (CHAT, chat(*user([IMAGE]), assistant("a"), *user("b")), 200),
        (CHAT, chat(assistant(None, CALL), result([IMAGE])), 200),
        (MESSAGES, anthropic(BLOCK), 400),
        (MESSAGES, answered([BLOCK]), 200),
        (RESPONSES, HISTORIES["an image of Responses"][1], 400),
        ("/api/chat", HISTORIES["an image of Ollama's"][1], 400),
        ("/api/generate", HISTORIES["an image to generate from"][1], 400),
        ("/v1/messages/count_tokens", anthropic(BLOCK), 200),
    ],
)
def test_the_owner_may_have_new_images_refused(
    refusing: TestClient, path: str, body: Json, status: int
) -> None:
    answer = refusing.post(path, json={"model": MODEL, **body})
    assert answer.status_code == status, answer.text
    assert (status == 200) == ("can't be sent this image" not in answer.text)


FUNCTIONS: dict[str, Json] = {
    CHAT: {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    MESSAGES: {"name": "f", "input_schema": {"type": "object"}},
    RESPONSES: {"type": "function", "name": "f", "parameters": {"type": "object"}},
}
BODIES = {CHAT: chat(), MESSAGES: anthropic(), RESPONSES: responses()}


@pytest.mark.slow
@pytest.mark.parametrize("path", FUNCTIONS)
@pytest.mark.parametrize(
    "kind",
    [
        *("web_search_20250305", "computer_20250124", "bash_20250124", "text_editor_20250429"),
        *("code_execution_20250522", "web_search_preview", "file_search", "image_generation"),
        *("computer_use_preview", "local_shell", "google_search", "openrouter:web_search"),
    ],
)
def test_tools_of_another_provider_are_reported(client: TestClient, path: str, kind: str) -> None:
    other = {"type": kind, "name": "x"}
    body = {"model": MODEL, **BODIES[path]}
    answer = client.post(path, json={**body, "tools": [other, FUNCTIONS[path], other]})
    assert answer.status_code == 200, answer.text
    assert f"tools.{kind}".replace(":", "%3A") in answer.headers[IGNORED].split(", ")
    alone = client.post(path, json={**body, "tools": [other]})
    assert (alone.status_code, "None of the `tools`" in alone.text) == (400, True)


@pytest.mark.parametrize(
    ("path", "choice"), [(CHAT, "required"), (MESSAGES, {"type": "any"}), (RESPONSES, "required")]
)
def test_a_call_of_a_tool_with_a_loose_schema_can_be_required(
    client: TestClient, engine: ScriptedEngine, path: str, choice: Any
) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "any"}}, "required": True}
    tool = json.loads(json.dumps(FUNCTIONS[path]).replace('{"type": "object"}', "null"))
    place = tool.get("function", tool)
    place["input_schema" if path == MESSAGES else "parameters"] = parameters
    for chosen in (choice, "auto" if isinstance(choice, str) else {"type": "auto"}):
        body = {"model": MODEL, **BODIES[path], "tools": [tool], "tool_choice": chosen}
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert engine.taken[-1].grammar
        if path != MESSAGES:
            unenforced = answer.json()["mlx_server"]["unenforced"]
            assert unenforced == ["tools.f: type at #/properties/a", "tools.f: required at #"]
