"""Errors and logs carry no prompt, no key and no path of the machine.

Every input has a canary in it, and every output is searched: whatever is answered, good or not, the
metrics, and the log at the level that tells the most.
"""

import json
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
from tests.tables import cases

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
GOOD: dict[str, Json] = {
    row["path"]: row["body"]
    for line in Path(__file__).with_name("canaries.jsonl").read_text("utf-8").splitlines()
    for row in [json.loads(line)]
}
assert all(WORD in str(body) for body in GOOD.values())
LONG = WORD * 500
"""More than the model's context."""


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
TOO_LONG: tuple[tuple[str, Json], ...] = (
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
    (CHAT, {"stop": [WORD * 900] * 64}),
    (COMPLETIONS, {"prompt": LONG}),
    (RESPONSES, {"input": LONG}),
)
BROKEN_MODELS = (
    *("missing", "a-file", "empty", "weights", "tokenizer"),
    *("config", "said", "nan", "shapes", "code"),
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


@cases
def test_bodies_for_one_route(http: httpx.Client, path: str, changes: Json) -> None:
    assert_discreet(http.post(path, json={**GOOD.get(path, {}), **changes}))


@pytest.mark.parametrize(("path", "changes"), TOO_LONG, ids=range(len(TOO_LONG)))
def test_bodies_that_are_too_long(http: httpx.Client, path: str, changes: Json) -> None:
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
    # a transcript is mended by its owner
    assert answer.status_code == (400 if model == "said" else 500)
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
