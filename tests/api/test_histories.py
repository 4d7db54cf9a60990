"""What agents send again with every turn, besides what is in histories.jsonl."""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.testclient import TestClient

from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.content import of_data, of_part, of_url
from mlx_server.api.histories import WITHOUT_MENDING
from mlx_server.api.messages.input import MessagesBody
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.models.tokenizer import Tokenizer
from tests.api import wire
from tests.api.wire import MODEL, Json, ScriptedEngine
from tests.calls import calls_of
from tests.tables import cases

IGNORED = "x-mlx-server-ignored"

pytestmark = pytest.mark.usefixtures("_as_before")


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
LINE = "[image: image/png, not shown: this model reads only text]"
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


PICTURED = responses(*user([{"type": "input_image", "image_url": URL}]))


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
            PICTURED,
            "input.content.input_image",
        ),
        ("/tokenize", {"messages": user([IMAGE])}, "messages.content.image_url"),
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
        (RESPONSES, PICTURED, 400),
        ("/api/chat", ollama({"role": "user", "content": "ab", "images": [DATA]}), 400),
        ("/api/generate", {"prompt": "ab", "images": [DATA], "stream": False}, 400),
        ("/v1/messages/count_tokens", anthropic(BLOCK), 200),
    ],
)
def test_the_owner_may_have_new_images_refused(
    refusing: TestClient, path: str, body: Json, status: int
) -> None:
    answer = refusing.post(path, json={"model": MODEL, **body})
    assert answer.status_code == status, answer.text
    assert (status == 200) == ("can't be sent this image" not in answer.text)


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (CHAT, {"messages": []}, 400, "`messages`: should have at least 1 item"),
        (MESSAGES, {"messages": [], "max_tokens": 4}, 400, "`messages`: should have at least 1"),
        (RESPONSES, {"previous_response_id": "resp_none"}, 400, "not found.*Send all items"),
        (RESPONSES, {"conversation": "conv_none"}, 404, "not found.*Send all items"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_none"}]}, 400, "Send the it"),
    ],
)
def test_a_history_that_is_not_here_is_refused_with_what_to_send(
    client: TestClient, path: str, body: Json, status: int, says: str
) -> None:
    answer = client.post(path, json={"model": MODEL, **({"input": "a"} | body)})
    assert answer.status_code == status
    assert re.search(says, answer.json()["error"]["message"])


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


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "content": "r" * 300}
ROUNDS: dict[type[BaseModel], tuple[str, list[Json]]] = {
    ChatBody: (
        "messages",
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "c"}]},
            {"role": "tool", "tool_call_id": "c", "content": "r" * 300},
            {"role": "assistant", "content": "done"},
        ],
    ),
    MessagesBody: (
        "messages",
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": [{**USE, "id": "c"}]},
            {"role": "user", "content": [{**RESULT, "tool_use_id": "c"}]},
            {"role": "assistant", "content": "done"},
        ],
    ),
    ResponsesBody: (
        "input",
        [
            {"role": "user", "content": "hello"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r" * 300},
            {"role": "assistant", "content": "done"},
        ],
    ),
}


@pytest.mark.parametrize("wire_type", ROUNDS)
def test_a_history_without_mistakes_is_read_as_fast_as_where_none_is_mended(
    wire_type: type[BaseModel],
) -> None:
    field, round_of_turns = ROUNDS[wire_type]
    body = {"model": MODEL, "max_tokens": 4, field: round_of_turns * 10}
    wire_type.model_validate(body)
    mending = calls_of(lambda: wire_type.model_validate(body))
    assert mending <= calls_of(lambda: wire_type.model_validate(body, context=WITHOUT_MENDING))


PICTURES = {
    "png": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
    "gif": b"GIF89a",
    "jpeg": b"\xff\xd8\xff\xe0\x00\x04ab",
    "webp": b"RIFF\x00\x00\x00\x00WEBPVP8 ",
}


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("name", PICTURES)
def test_the_type_of_a_picture(name: str) -> None:
    kind = f"image/{name}"
    data = PICTURES[name] + bytes(1000)
    assert of_url("image", url(data, kind), "p").about == kind
    encoded = base64.b64encode(data).decode()
    assert of_data("image", encoded, "", "p").about == kind
    assert of_data("image", url(data, ""), "", "p").about == kind


@cases
def test_odd_urls(given: Any, about: str) -> None:
    found = of_url("image", given, "p")
    assert found.about == about
    passed = isinstance(given, str) and given.lower().startswith(("data:", "http"))
    assert (found.part == {"type": "image_url", "image_url": {"url": given}}) == passed


PNG_URL = url(PICTURES["png"])
SEEN = {"type": "image_url", "image_url": {"url": PNG_URL}}


@cases
def test_the_forms_of_other_apis(part: Any, passed: Any) -> None:
    wanted = {**SEEN, "image_url": {"url": PNG_URL, "detail": "low"}} if passed == "low" else passed
    assert of_part("image", part, "p").part == wanted


def test_audio_is_passed_on_in_openais_form() -> None:
    part = {"input_audio": {"data": "aGk=", "format": "wav"}}
    found = of_part("audio", part, "p")
    assert (found.part, found.about) == ({"type": "input_audio", **part}, "wav")
