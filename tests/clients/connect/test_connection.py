"""The server that a client is connected to, and what its user is shown."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from mlx_server.clients.connect.clients import CLIENTS, CONTEXT, OUTPUT, Connection, filled
from mlx_server.clients.connect.connection import (
    NO_KEY,
    command_of,
    connection_to,
    listing,
    markdown,
    shown,
)
from mlx_server.clients.connect.writing import changes, write
from mlx_server.errors import ServerError, SettingsError
from tests.cli.running import NO_URLS

NOWHERE = "http://127.0.0.1:9"
MODELS = {"data": [{"id": "org/m"}, {"id": "other"}]}

Answer = tuple[int, Any]
Play = Callable[..., str]

asked: list[tuple[str, str | None]] = []


@pytest.fixture
def play() -> Iterator[Play]:
    """Starts a server that has these answers to GET, by their paths; returns its URL."""
    asked.clear()
    with ExitStack() as servers:

        def started(answers: dict[str, Answer]) -> str:
            class Playing(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    asked.append((self.path, self.headers["Authorization"]))
                    status, body = answers.get(self.path, (404, {"detail": "Not Found"}))
                    sent = (body if isinstance(body, str) else json.dumps(body)).encode()
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(sent)))
                    self.end_headers()
                    self.wfile.write(sent)

                def log_message(self, format: str, *args: Any) -> None:
                    pass

            server = servers.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Playing))
            Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            servers.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_address[1]}"

        yield started


def test_nothing_is_asked_where_all_is_given() -> None:
    for url in (NOWHERE, f"{NOWHERE}/", f"{NOWHERE}/v1", f"{NOWHERE}/v1/"):
        assert connection_to(url, "", "m", 10) == Connection(NOWHERE, NO_KEY, "m", 10)


def test_the_first_model_and_its_context_are_asked_for_with_the_key(play: Play) -> None:
    url = play({"/v1/models": (200, MODELS), "/v1/models/org/m": (200, {"context_length": 4096})})
    assert connection_to(f"{url}/v1", "k", None, None) == Connection(url, "k", "org/m", 4096)
    assert asked == [("/v1/models", "Bearer k"), ("/v1/models/org/m", "Bearer k")]


def test_what_is_given_is_not_asked_for(play: Play) -> None:
    url = play({"/v1/models": (200, MODELS)})
    assert connection_to(url, "", None, 7) == Connection(url, NO_KEY, "org/m", 7)
    assert asked == [("/v1/models", None)]


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("org/m:pirate", "/v1/models/org/m:pirate"),
        ("a?b", "/v1/models/a%3Fb"),
        ("a#b", "/v1/models/a%23b"),
        ("ä b", "/v1/models/%C3%A4%20b"),
    ],
)
def test_a_model_of_any_name_is_asked_for_by_it(play: Play, model: str, path: str) -> None:
    url = play({path: (200, {"context_length": 5})})
    assert connection_to(url, "", model, None).context == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, {"error": {"message": "It is not served here."}}), "It is not served here"),
        ((401, {"error": {"message": "No key."}}), "No key.*--api-key"),
        ((404, {"detail": "Not Found"}), "not OpenAI-compatible"),
        ((502, "<html>Bad gateway</html>"), "not OpenAI-compatible"),
        ((200, "<html>Hello</html>"), "not OpenAI-compatible"),
        ((200, []), "not OpenAI-compatible"),
        ((200, {}), "context of m is.*--context-length"),
        ((200, {"context_length": None}), "--context-length"),
        ((200, {"context_length": "4096"}), "--context-length"),
        ((200, {"context_length": True}), "--context-length"),
    ],
)
def test_an_answer_without_the_context_is_an_error_in_a_sentence(
    play: Play, answer: Answer, said: str
) -> None:
    url = play({"/v1/models/m": answer})
    with pytest.raises(ServerError, match=said):
        connection_to(url, "", "m", None)


def test_a_server_without_models_is_told_what_to_list(play: Play) -> None:
    with pytest.raises(SettingsError, match="List one"):
        connection_to(play({"/v1/models": (200, {"data": []})}), "", None, 7)


@pytest.mark.parametrize("model", [None, "m"])
def test_where_no_server_listens_it_is_said_how_to_start_one(model: str | None) -> None:
    with pytest.raises(ServerError, match="mlx-server serve"):
        connection_to(NOWHERE, "", model, None)


@pytest.mark.parametrize("url", NO_URLS)
def test_what_is_no_url_is_not_written_anywhere(url: str) -> None:
    with pytest.raises(SettingsError):
        connection_to(url, "", "m", 100)


README = Path(__file__).parents[3] / "mlx_server" / "clients" / "README.md"
SAMPLE = Connection("http://127.0.0.1:8000", "none", "qwen3-4b", 40_960)


@pytest.mark.parametrize("name", CLIENTS)
def test_what_is_shown_is_all_that_a_client_needs(name: str) -> None:
    text = shown(CLIENTS[name], SAMPLE)
    for value in (SAMPLE.url, SAMPLE.model, CLIENTS[name].command[0]):
        assert value in text
    assert str(SAMPLE.context) in text or "no setting for the length" in text
    assert all(file.path in text for file in CLIENTS[name].files)


def test_all_clients_are_listed() -> None:
    assert [line.split()[0] for line in listing().splitlines()] == list(CLIENTS)


def test_the_document_is_made_from_the_same_records() -> None:
    assert f"-->\n{markdown()}" in README.read_text("utf-8"), (
        "made by `mlx-server connect --markdown`"
    )


HERE = Connection("http://127.0.0.1:8000", "none", "m", 4096)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for each in CLIENTS.values():
        (tmp_path / each.command[0]).touch(mode=0o755)
    return tmp_path


def test_a_client_that_reads_its_environment_starts_at_once() -> None:
    command, environment = command_of("claude", CLIENTS["claude"], HERE)
    assert command == ["claude"]
    assert environment["ANTHROPIC_BASE_URL"] == HERE.url


@pytest.mark.parametrize("name", CLIENTS)
def test_others_start_once_their_files_are_written(name: str) -> None:
    client = CLIENTS[name]
    if not client.starts_without_files:
        with pytest.raises(SettingsError, match="Add --write"):
            command_of(name, client, HERE)
    list(write(changes(client, HERE)))
    command, _ = command_of(name, client, HERE)
    assert command[0] == client.command[0]


def test_a_client_that_is_not_installed_is_named(home: Path) -> None:
    (home / "claude").unlink()
    with pytest.raises(SettingsError, match="install Claude Code first"):
        command_of("claude", CLIENTS["claude"], HERE)


HERE = Connection("http://here", "secret", "m", 4099)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{url}/v1 {key} {model} {context}", "http://here/v1 secret m 4099"),
        ({"openai/{model}": [{"{key}": ("{url}",)}]}, {"openai/m": [{"secret": ["http://here"]}]}),
        ([CONTEXT, OUTPUT, f"{CONTEXT}!"], [4099, 1024, f"{CONTEXT}!"]),
        ([True, None, 0, 1.5], [True, None, 0, 1.5]),
        ("{other} {} {{model}}", "{other} {} {m}"),
    ],
)
def test_each_placeholder_has_its_value(template: Any, expected: Any) -> None:
    assert filled(template, HERE) == expected


@pytest.mark.parametrize("value", ["{model}", "{context}", "{url}{key}", r"\1\g<0>", CONTEXT])
def test_a_value_that_looks_like_a_placeholder_stays_as_it_is(value: str) -> None:
    connection = Connection(url=value, key=value, model=value, context=1)
    template = "{url} {key} {model}"
    assert filled(template, connection) == f"{value} {value} {value}"
    assert filled({"{model}": "{key}"}, connection) == {value: value}
