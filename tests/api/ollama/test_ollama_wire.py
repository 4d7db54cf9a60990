import json
from pathlib import Path

import msgspec
import pytest
from ollama import ListResponse, ProcessResponse, ShowResponse
from starlette.testclient import TestClient

from mlx_server.api.accumulator import arguments_object
from mlx_server.api.ollama import (
    NEVER,
    OllamaChatBody,
    OllamaOutput,
    chat_request,
    chat_shape,
    line,
    rfc3339,
    seconds_of,
)
from mlx_server.errors import BadRequest
from mlx_server.events import Finished, Started, TokenCounts, ToolCallDelta, ToolCallFinished
from mlx_server.events import ToolCallStarted as Called
from mlx_server.messages import Conversation
from tests.api import wire
from tests.api.folding import body_of, chunks_of
from tests.api.ollama.talking import (
    BODIES,
    CHAT,
    DURATIONS,
    GENERATE,
    content,
    post,
    refused,
    streamed,
    whole,
)
from tests.api.wire import MODEL, TEXT, Json, ScriptedEngine
from tests.tables import cases

IGNORED = "x-mlx-server-ignored"
BOTH = pytest.mark.parametrize("path", BODIES)
ALL = len(TEXT.encode()) + 1
"""Tokens of a whole answer, its last one included."""

NEVER_THE_SAME = {"created_at", *DURATIONS}

pytestmark = pytest.mark.usefixtures("_as_before")


@BOTH
@cases
def test_a_stream_is_the_answer_in_pieces(client: TestClient, path: str, asked: Json) -> None:
    chunks, answer = streamed(client, path, **asked), whole(client, path, **asked)
    assert "".join(content(path, chunk) for chunk in chunks) == content(path, answer)
    scored = [entry for chunk in chunks for entry in chunk.get("logprobs", [])]
    assert scored == answer.get("logprobs", [])
    ends = [
        {k: v for k, v in end.items() if k not in {*NEVER_THE_SAME, "logprobs"}}
        for end in (chunks[-1], answer)
    ]
    assert ends[0].keys() == ends[1].keys()
    assert ends[0]["eval_count"] == ends[1]["eval_count"]


@BOTH
def test_an_answer(client: TestClient, path: str) -> None:
    answer = whole(client, path)
    assert content(path, answer) == TEXT
    assert (answer["model"], answer["done"], answer["done_reason"]) == (MODEL, True, "stop")
    assert answer["eval_count"] == ALL
    assert answer["total_duration"] == sum(answer[name] for name in DURATIONS[1:])


@BOTH
@pytest.mark.parametrize(("most", "tokens"), [(3, 3), (-1, ALL), (-2, ALL), (0, ALL)])
def test_num_predict(client: TestClient, path: str, most: int, tokens: int) -> None:
    answer = whole(client, path, options={"num_predict": most})
    assert answer["eval_count"] == tokens
    assert answer["done_reason"] == ("length" if most == 3 else "stop")


@BOTH
@pytest.mark.parametrize("top", [None, 0, 2])
def test_log_probabilities(client: TestClient, path: str, top: int | None) -> None:
    assert "logprobs" not in whole(client, path)
    found = whole(client, path, logprobs=True, top_logprobs=top)["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in found).decode() == TEXT
    assert {len(entry["top_logprobs"]) for entry in found} == {top or 0}


def test_a_raw_prompt_is_not_rendered(client: TestClient, engine: ScriptedEngine) -> None:
    whole(client, GENERATE, raw=True)
    assert len(engine.taken[-1].prompt) == len("hi")
    assert "put the system prompt into it" in refused(
        post(client, GENERATE, raw=True, system="Be brief.")
    )


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest"])
def test_latest_is_the_model(client: TestClient, path: str, name: str) -> None:
    assert whole(client, path, model=name)["model"] == MODEL
    assert wire.ok(client.post("/api/show", json={"model": name}))


@pytest.mark.parametrize("name", [f"{MODEL}:other", ":latest"])
@pytest.mark.parametrize("path", [CHAT, GENERATE, "/api/show"])
def test_no_such_model(client: TestClient, path: str, name: str) -> None:
    for asked in ({}, {"messages": [], "prompt": ""}):
        body = {**BODIES.get(path, {}), "model": name, **asked}
        said = refused(client.post(path, json=body), 404)
        assert "not served here" in said or "no adapter" in said


@BOTH
def test_without_a_prompt_the_model_is_loaded_and_unloaded(tiny_path: Path, path: str) -> None:
    with wire.client(tiny_path, ScriptedEngine()) as client:
        asked = {name: None for name in BODIES[path] if name != "model"}
        assert running(client) == []
        answer = wire.ok(post(client, path, **asked))
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        (model,) = running(client)
        assert (model["name"], model["context_length"]) == (MODEL, 2048)
        assert model["expires_at"].startswith("9999-")
        wire.ok(post(client, path, **asked, keep_alive="5m"))
        assert not running(client)[0]["expires_at"].startswith("9999-")
        wire.ok(post(client, path, **asked, keep_alive=-1))
        assert running(client)[0]["expires_at"].startswith("9999-")
        assert wire.ok(post(client, path, **asked, keep_alive=0))["done_reason"] == "unload"
        assert running(client) == []


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("stream", [True, False])
def test_a_model_that_is_not_kept_is_unloaded_after_its_answer(
    tiny_path: Path, path: str, stream: bool
) -> None:
    with wire.client(tiny_path, ScriptedEngine()) as client:
        post(client, path, stream=stream, keep_alive=0)
        assert running(client) == []
        whole(client, path)
        assert len(running(client)) == 1, "the next request loads it as models.yaml has it"


@BOTH
def test_clients_load_and_keep_no_model_if_its_owner_says_so(tiny_path: Path, path: str) -> None:
    with wire.client(tiny_path, ScriptedEngine(), runtime_models=False) as client:
        asked = {name: None for name in BODIES[path] if name != "model"}
        for seconds in (None, 0, -1):
            answer = post(client, path, **asked, keep_alive=seconds)
            assert answer.status_code == 403
            assert "`runtime_models: true`" in answer.json()["error"]
        assert running(client) == []
        answer = post(client, path, stream=False, keep_alive=0)
        assert wire.ok(answer)["done"]
        assert "keep_alive" in answer.headers[IGNORED]
        assert running(client)[0]["expires_at"].startswith("9999-")
        loading = {"model": MODEL, "keep_alive": -1}
        assert client.post("/api/embed", json=loading | {"input": []}).status_code == 403
        assert client.post("/api/embeddings", json=loading | {"prompt": ""}).status_code == 403


def running(client: TestClient) -> list[Json]:
    found = wire.ok(client.get("/api/ps"))
    ProcessResponse.model_validate_json(json.dumps(found))
    models: list[Json] = found["models"]
    return models


def test_the_models(client: TestClient) -> None:
    found = wire.ok(client.get("/api/tags"))
    ListResponse.model_validate_json(json.dumps(found))
    (model,) = found["models"]
    assert (model["name"], model["model"]) == (MODEL, MODEL)
    assert len(model["digest"]) == 64
    shown = wire.ok(client.post("/api/show", json={"model": MODEL}))
    assert (model["capabilities"], model["details"]) == (shown["capabilities"], shown["details"])
    assert model["details"]["context_length"] == 2048


def test_a_date_has_a_fraction() -> None:
    """Readers of dates in Swift take none without, where Ollama's always has one."""
    assert rfc3339(5) == "1970-01-01T00:00:05.000000Z"
    assert NEVER.endswith(".000000Z")


def test_a_model_is_described(client: TestClient) -> None:
    found = wire.ok(client.post("/api/show", json={"model": MODEL, "verbose": True}))
    ShowResponse.model_validate_json(json.dumps(found))
    family = found["details"]["family"]
    info = found["model_info"]
    assert (info["general.architecture"], info[f"{family}.context_length"]) == (family, 2048)
    assert {"completion", "tools"} <= set(found["capabilities"])
    assert ".Tools" in found["template"], "LiteLLM looks there"
    by_its_older_name = wire.ok(client.post("/api/show", json={"name": MODEL}))
    assert by_its_older_name == found
    assert "`model` is missing" in refused(client.post("/api/show", json={}))


def test_clients_find_out_that_a_server_is_there(client: TestClient) -> None:
    assert client.get("/").text == "mlx-server is running"
    for path in ("/", "/api/version", "/api/tags"):
        assert client.head(path).status_code == 200
    numbers = map(int, wire.ok(client.get("/api/version"))["version"].split("."))
    assert [*numbers] >= [0, 13, 4], "Codex wants the version that has Responses"


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
def test_there_are_no_embeddings_of_a_chat_model(client: TestClient, path: str) -> None:
    body = {"model": MODEL, "input": "x", "prompt": "x"}
    assert "generates text" in refused(client.post(path, json=body))


@cases
def test_no_client_changes_the_machine(
    client: TestClient, method: str, path: str, command: str
) -> None:
    said = refused(client.request(method, path, json={"model": MODEL}), 403)
    assert command in said


def test_an_overflow_has_its_exact_number(client: TestClient) -> None:
    said = refused(post(client, GENERATE, prompt="x" * 3000, raw=True))
    # strands-agents knows it by Ollama's own words, others by OpenAI's
    assert said.startswith("the prompt is longer than the context length currently available")
    assert "maximum context length is 2048 tokens" in said
    assert "resulted in 3000 tokens" in said


@pytest.mark.slow
@pytest.mark.parametrize("names", [("f",), ("f", "g")])
def test_thousands_of_results_find_their_calls(names: tuple[str, ...]) -> None:
    """Without looking through all calls for each result, which would take minutes."""
    many = 20_000
    calls = [{"function": {"name": names[n % len(names)]}} for n in range(many)]
    turns = [{"role": "tool", "tool_name": names[-1]} for _ in range(many)]
    turns += [{"role": "tool"}] * many
    messages = [{"role": "assistant", "tool_calls": calls}, *turns]
    body = OllamaChatBody.model_validate({"model": "m", "messages": messages})
    (conversation,) = chat_request(body, "m").prompts
    assert isinstance(conversation, Conversation)
    ids = [message.tool_call_id for message in conversation.messages[1:]]
    named = [f"call_0_{n}" for n in range(len(names) - 1, many, len(names))]
    others = [f"call_0_{n}" for n in range(0, many, 2)] if len(names) > 1 else []
    assert ids == [*named, *[None] * (many - len(named)), *others, *[None] * (many - len(others))]


@cases
def test_durations(given: int | float | str, seconds: float) -> None:
    assert seconds_of(given) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "given", ["", "-", "m", "5 m", "5d", "--1", "1e5", "5m!", "nan", "inf", "٣m", "1m" * 50]
)
def test_what_is_no_duration(given: str) -> None:
    with pytest.raises(BadRequest, match="5m or 1h30m"):
        seconds_of(given)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ('{"a": ', {}),
        ("[1]", {}),
        ("[" * 100_000, {}),
        ('{"a": ' * 100_000, {}),
        (r'{"a": "\ud83d\ude00"}', {"a": "😀"}),
        (r'{"a\ud83d": ["\udc00x"]}', {"a?": ["?x"]}),
        ('{"a": %s}' % ("9" * 5000), {}),
        ('{"a": %s}' % ("9" * 50), {"a": int("9" * 50)}),
    ],
)
def test_arguments_can_always_be_sent(text: str, found: object) -> None:
    assert arguments_object(text) == found
    assert msgspec.json.encode(arguments_object(text))


def test_half_a_surrogate_pair_is_no_error_of_ollama_s_routes() -> None:
    calling = (
        Started("m", 3),
        Called(0, 0, "c", "f"),
        ToolCallDelta(0, 0, r'{"a": "\ud83d"}'),
        ToolCallFinished(0, 0),
        Finished(0, "tool_calls", TokenCounts(completion_tokens=5)),
    )
    answer = body_of(OllamaOutput(model="m", shape=chat_shape), calling)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "f", "arguments": {"a": "?"}}
    for chunk in chunks_of(OllamaOutput(model="m", shape=chat_shape), calling):
        assert line(chunk)


def test_ollamas_calls_are_numbered() -> None:
    twice = [
        event
        for call in range(2)
        for event in (Called(0, call, f"c{call}", "f"), ToolCallFinished(0, call))
    ]
    calling = (Started("m", 3), *twice, Finished(0, "tool_calls", TokenCounts()))
    whole = body_of(OllamaOutput(model="m", shape=chat_shape), calling)["message"]["tool_calls"]
    chunks = chunks_of(OllamaOutput(model="m", shape=chat_shape), calling)
    streamed = [call for chunk in chunks for call in chunk["message"].get("tool_calls", ())]
    assert streamed == whole
    assert [call["function"]["index"] for call in whole] == [0, 1]
