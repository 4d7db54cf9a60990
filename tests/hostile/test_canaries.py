"""Errors and logs carry no prompt, no key and no path of the machine.

Every input has a canary in it, and every output is searched: whatever is answered, good or not, the
metrics, and the log at the level that tells the most.
"""

import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from starlette.testclient import TestClient

import mlx_server
from mlx_server.system import logs
from tests.api import wire
from tests.hostile import zoo
from tests.live.server import TINY, LiveServer, eventually, serving

Json = dict[str, Any]

WORD = "wordcanary"
"""In everything that may be a prompt's, or a secret between a client and its model."""
NAME = "namecanary"
"""In what a client names, and in its own grammars: its error may name it as well."""
KEY, SECRET = "keycanary", "secretcanary"
"""Of the server itself; and for a server of tools."""
PLACE = "placecanary"
"""A folder around everything on the disk."""

CODE = str(Path(mlx_server.__file__).parents[1])
NOWHERE = (KEY, SECRET, PLACE, CODE, sys.prefix, str(Path.home()) + "/")
"""May be found in no output at all."""

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "description": WORD,
    "properties": {WORD: {"enum": [WORD], "description": WORD}},
    "required": [WORD],
}
FUNCTION = {"name": NAME, "description": WORD, "parameters": SCHEMA}
CALL = {
    "id": NAME,
    "type": "function",
    "function": {"name": NAME, "arguments": f'{{"a": "{WORD}"}}'},
}
OWN = {"user": WORD, "metadata": {WORD: WORD}, "safety_identifier": WORD, "prompt_cache_key": WORD}
GOOD: dict[str, Json] = {
    CHAT: {
        "model": TINY,
        "messages": [
            {"role": "system", "content": WORD},
            {"role": "user", "content": WORD, "name": NAME},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": NAME, "content": WORD},
            {"role": "user", "content": [{"type": "text", "text": WORD}]},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "stop": [WORD],
        "max_tokens": 2,
        **OWN,
    },
    COMPLETIONS: {"model": TINY, "prompt": WORD, "stop": WORD, "max_tokens": 2, "user": WORD},
    "/generate": {
        "model": TINY,
        "messages": [{"role": "user", "content": WORD}],
        "tools": [FUNCTION],
        "max_response_tokens": 2,
    },
    RESPONSES: {
        "model": TINY,
        "instructions": WORD,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": WORD}]},
            {"type": "function_call", "call_id": NAME, "name": NAME, "arguments": f'["{WORD}"]'},
            {"type": "function_call_output", "call_id": NAME, "output": WORD},
        ],
        "tools": [{"type": "function", **FUNCTION, "strict": False}],
        "max_output_tokens": 16,
        **OWN,
    },
}
LONG = WORD * 500
"""More than the model's context."""


def grammar(schema: Any) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": NAME, **schema}}}


def tool_server(**more: Any) -> Json:
    server = {
        "type": "mcp",
        "server_label": NAME,
        "server_url": f"http://127.0.0.1:1/{WORD}",
        "authorization": SECRET,
        "headers": {"x-key": SECRET},
    }
    return {"tools": [{**server, **more}], "stream": bool(more)}


ANY_ROUTE: tuple[Json, ...] = (
    {},
    {"stream": True},
    {"model": NAME},
    {"model": {WORD: WORD}},
    {"adapter": NAME},
    {"temperature": WORD},
    {"top_p": WORD, "stream": WORD},
    {"seed": WORD, "tools": WORD},
    {WORD: WORD},
)
"""Set over the good ones."""
OWN_ROUTES: tuple[tuple[str, Json], ...] = (
    (CHAT, {"messages": WORD}),
    (CHAT, {"messages": [WORD]}),
    (CHAT, {"messages": [{"role": WORD, "content": WORD}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": WORD, "text": WORD}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [WORD]}]}),
    (CHAT, {"tools": [{"type": NAME}]}),
    (CHAT, {"tool_choice": WORD}),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": NAME * 9}}}),
    (CHAT, {"stop": [WORD * 900] * 64}),
    (CHAT, {"stop": [{WORD: WORD}]}),
    (CHAT, {"logit_bias": {WORD: 1}}),
    (CHAT, {"chat_template": WORD}),
    (CHAT, {"chat_template_kwargs": {WORD: WORD}}),
    (CHAT, {"response_format": {"type": WORD}}),
    (CHAT, grammar({"schema": SCHEMA})),
    (CHAT, grammar({"schema": {"type": NAME}})),
    (CHAT, grammar({"schema": {"$ref": f"http://evil.example/{NAME}"}})),
    (CHAT, grammar({"schema": {"type": "string", "pattern": f"{WORD}(?<={WORD})"}})),
    (CHAT, grammar({"schema": {"type": "string", "pattern": f"({WORD}"}})),
    (CHAT, {"structured_outputs": {"grammar": f'start: "{WORD}" {NAME}'}}),
    (CHAT, {"structured_outputs": {"regex": f"[{NAME}"}}),
    (COMPLETIONS, {"prompt": LONG}),
    (COMPLETIONS, {"prompt": [WORD, 1]}),
    (COMPLETIONS, {"suffix": WORD, "echo": WORD}),
    (RESPONSES, {"input": [{"type": WORD, "content": WORD}]}),
    (RESPONSES, {"input": [{"role": WORD, "content": WORD}]}),
    (RESPONSES, {"input": LONG}),
    (RESPONSES, {"previous_response_id": NAME}),
    (RESPONSES, {"conversation": NAME}),
    (RESPONSES, {"include": [WORD]}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": NAME, "schema": {"type": 5}}}}),
    (RESPONSES, tool_server()),
    (RESPONSES, tool_server(require_approval="never")),
    (RESPONSES, tool_server(server_url=f"http://10.255.255.1.{NAME}.invalid:99999/{WORD}")),
    (RESPONSES, tool_server(server_url=f"file:///{WORD}")),
    ("/v1/conversations", {"items": [{"type": "message", "role": WORD, "content": WORD}]}),
    ("/v1/load_lora_adapter", {"lora_name": NAME, "lora_path": f"/{NAME}/{NAME}"}),
    ("/v1/load_lora_adapter", {"lora_name": NAME, "lora_path": NAME}),
    ("/v1/unload_lora_adapter", {"lora_name": NAME, "model": NAME}),
)
BROKEN_MODELS = (
    "missing",
    "a-file",
    "empty",
    "weights",
    "tokenizer",
    "config",
    "said",
    "nan",
    "shapes",
    "code",
)
HEADERS = {"user-agent": WORD, "cookie": WORD, "referer": f"http://localhost/{WORD}", "x-own": WORD}


def damaged(tiny: Path, folder: Path) -> Json:
    """Models that fail, each in a way of its own."""
    (folder / "a-file").write_text(PLACE)
    (folder / "empty").mkdir()
    for name in ("weights", "tokenizer", "config", "nan", "shapes", "code"):
        shutil.copytree(tiny, folder / name)
    (folder / "weights/model.safetensors").write_bytes(b"\xff" * 64)
    (folder / "tokenizer/tokenizer.json").write_text(f'{{"{PLACE}": 1}}')
    (folder / "config/config.json").write_bytes(b'{"model_type": "\xff"}')
    zoo.config(model_file="own.py")(folder / "code")
    for name, layer in {"nan": np.full((320, 64), np.nan), "shapes": np.ones((3, 64))}.items():
        file = folder / name / "model.safetensors"
        tensors = {**load_file(file), "lm_head.weight": layer.astype(np.float32)}
        save_file(tensors, file, metadata={"format": "mlx"})
    (folder / "said.jsonl").write_text('{"output": "x"}')
    said = {"source": "replay:said.jsonl", "family": "plain"}
    return {"said": said} | {n: {"source": f"./{n}"} for n in BROKEN_MODELS if n != "said"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp(PLACE)
    shutil.copytree(tiny_path, folder / "served")
    (folder / "adapters" / NAME).mkdir(parents=True)
    (folder / "adapters" / NAME / "adapter_config.json").write_text(f'{{"rank": "{PLACE}"}}')
    models = {TINY: {"source": "./served", "preload": True}, **damaged(tiny_path, folder)}
    settings = {
        "api_keys": [KEY],
        "log_level": "debug",
        "allow_private_urls": True,
        "adapter_dirs": ["."],
    }
    with serving(folder, {"models": models, "server": settings}) as server:
        (folder / "said.jsonl").unlink()  # without it the server would not start
        yield server


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}", **HEADERS}
    with httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=60) as http:
        yield http


@pytest.fixture(autouse=True)
def _nothing_is_logged(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        server: LiveServer = request.getfixturevalue("server")
        assert_silent(server.log, WORD, NAME, *NOWHERE)


def assert_silent(text: str, *canaries: str) -> None:
    reported = {canary: text[max(0, text.find(canary) - 200) :][:300] for canary in canaries}
    assert not {canary: place for canary, place in reported.items() if canary in text}


def assert_discreet(response: httpx.Response) -> None:
    said = f"{response.headers}\n{response.text}"
    assert_silent(said, *NOWHERE)
    if response.status_code >= 400:
        assert_silent(said, WORD)


@pytest.mark.parametrize("changes", ANY_ROUTE, ids=str)
@pytest.mark.parametrize("path", GOOD)
def test_bodies_for_any_route(http: httpx.Client, path: str, changes: Json) -> None:
    assert_discreet(http.post(path, json={**GOOD[path], **changes}, params={WORD: WORD}))


@pytest.mark.parametrize(("path", "changes"), OWN_ROUTES, ids=range(len(OWN_ROUTES)))
def test_bodies_for_one_route(http: httpx.Client, path: str, changes: Json) -> None:
    assert_discreet(http.post(path, json={**GOOD.get(path, {}), **changes}))


@pytest.mark.parametrize(
    "body",
    [
        f'{{"messages": "{WORD}',
        f'{{"messages": {WORD}}}',
        f'"{WORD}"',
        f'{{"a": "{WORD}\\ud800"}}',
        f'{{"a": 1e999, "b": "{WORD}"}}',
        f'{{"a": "{WORD}\x01"}}',
    ],
)
@pytest.mark.parametrize("path", GOOD)
def test_bodies_that_are_no_json(http: httpx.Client, path: str, body: str) -> None:
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert_discreet(answer)


@pytest.mark.parametrize("path", [f"/{NAME}", f"/v1/models/{NAME}", f"/v1/responses/{NAME}", "/v1"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS", NAME.upper()])
def test_paths_and_methods(http: httpx.Client, method: str, path: str) -> None:
    assert_discreet(http.request(method, path, params={WORD: WORD}))


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {SECRET}"},
        {"x-api-key": SECRET, "authorization": ""},
        {"authorization": f"Basic {SECRET}"},
        {"host": f"{NAME}.example"},
        {"origin": f"http://{NAME}.example"},
        {"content-type": WORD},
        {"content-encoding": WORD},
        {"x-request-id": f"{WORD}\x7f"},
    ],
    ids=str,
)
def test_headers(http: httpx.Client, headers: dict[str, str]) -> None:
    answer = http.post(CHAT, json=GOOD[CHAT], headers=headers)
    assert answer.status_code in {200, 401, 403, 415}
    assert_discreet(answer)


@pytest.mark.parametrize("model", BROKEN_MODELS)
def test_models_that_fail(http: httpx.Client, model: str) -> None:
    answer = http.post(CHAT, json={**GOOD[CHAT], "model": model})
    assert answer.status_code == (
        400 if model == "said" else 500
    )  # a transcript is mended by its owner
    assert answer.json()["error"]["message"].count(" ") > 3, "it says what is wrong"
    assert_discreet(answer)


def test_the_log_tells_of_it_all(server: LiveServer) -> None:
    for reported in (
        f"POST {CHAT} 400 ",
        "GET /v1/responses/* 404",
        "* /* 404",
        "shapes could not be loaded",
    ):
        assert reported in server.log
    for model in BROKEN_MODELS:
        assert f"{model}: " in server.log or model in {"said", "nan"}
    assert not re.search(r" (DEBUG|INFO) +(?!mlx_server)\S+:", server.log), "libraries tell more"


def test_what_is_shown_of_the_server(http: httpx.Client) -> None:
    for path in ("/health", "/metrics", "/v1/pool", "/v1/models", "/openapi.json"):
        answer = http.get(path)
        assert answer.status_code == 200
        assert_silent(f"{answer.headers}\n{answer.text}", WORD, *NOWHERE)


def test_an_engine_that_dies(server: LiveServer, http: httpx.Client) -> None:
    asked = {**GOOD[COMPLETIONS], "max_tokens": 300, "logit_bias": {"0": -100, "2": -100}}
    with http.stream("POST", COMPLETIONS, json={**asked, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.engine.kill()
        rest = "\n".join(lines)
    assert rest.rstrip().endswith("data: [DONE]")
    assert_silent(rest, WORD, *NOWHERE)
    eventually(lambda: http.get("/health").status_code == 200, "it serves again")


class Careless(wire.ScriptedEngine):
    """With an error that quotes what it was at, as many do; and which others caused."""

    def said(self, row: Any) -> Iterator[Any]:
        try:
            Path(f"/{PLACE}/{WORD}").read_text()
        except OSError as error:
            causes = [KeyError(WORD), ValueError(f"/{PLACE}/x"), error]
            raise RuntimeError(f"no {WORD} in /{PLACE}/x") from ExceptionGroup(WORD, causes)
        yield


@pytest.mark.parametrize("style", [logs.PlainFormatter(), logs.JsonFormatter()])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_errors_that_nobody_expected(
    tiny_path: Path, caplog: pytest.LogCaptureFixture, path: str, style: logging.Formatter
) -> None:
    client: TestClient
    with caplog.at_level(logging.DEBUG), wire.client(tiny_path, Careless()) as client:
        for stream in (False, True):
            answer = client.post(path, json={**GOOD[path], "stream": stream})
            assert_silent(answer.text, PLACE, CODE)
    reported = "\n".join(style.format(record) for record in caplog.records)
    assert "RuntimeError" in reported
    assert "FileNotFoundError: No such file or directory" in reported
    assert "tests/hostile/test_canaries.py:" in reported
    assert_silent(reported, WORD, NAME, PLACE, CODE, sys.prefix)
