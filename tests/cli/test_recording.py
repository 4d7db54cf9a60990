"""`mlx-server replay record --upstream`: another server's answers, and what is left of its keys."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from mlx_server.cli import app
from mlx_server.errors import ServerError
from mlx_server.families import family_named
from mlx_server.messages import Conversation, Message
from mlx_server.sources.redaction import matching, without_secrets
from mlx_server.sources.transcript import read_transcript
from tests.families.goldens import tokenizer_of

KEY = "not-of-any-known-form-1"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
MESSAGES: dict[str, dict[str, Any]] = {
    "call it": {"content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
    "say it": {"content": "It is sk-abcdefghijklmnopqrst.", "reasoning": "Well."},
    "break it": {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
    f"my key is {KEY}": {"content": f"{KEY}?"},
}


class Upstream(BaseHTTPRequestHandler):
    asked: list[tuple[str | None, dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.headers["Authorization"], body))
        message = MESSAGES.get(body["messages"][-1]["content"])
        found = {"choices": [{"message": message}]} if message else {"error": {"message": "No."}}
        sent = json.dumps(found).encode()
        self.send_response(200 if message else 404)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[str]:
    Upstream.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Upstream) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()


def record(folder: Path, url: str, requests: list[Any], *options: str) -> Result:
    (folder / "asked.yaml").write_text(yaml.safe_dump(requests))
    named = ("--requests", str(folder / "asked.yaml"), "--output", str(folder / "said.yaml"))
    command = ["replay", "record", "their/model", "--upstream", url, *named, *options]
    return CliRunner().invoke(app, command)


def test_a_recording_plays_in_any_family(
    tmp_path: Path, upstream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)
    body = {"messages": [{"role": "user", "content": "call it"}], "temperature": 0}
    options = ("--api-key-env", "THEIR_KEY")
    result = record(tmp_path, upstream, [body, "say it", f"my key is {KEY}"], *options)
    assert result.exit_code == 0, result.output
    assert Upstream.asked[0] == (
        f"Bearer {KEY}",
        {**body, "model": "their/model", "stream": False},
    )
    text = (tmp_path / "said.yaml").read_text()
    assert KEY not in text + result.output
    assert "sk-" not in text
    found = read_transcript(tmp_path / "said.yaml", 1)
    entries = [
        found.pick(Conversation((Message("user", asked),))).entry
        for asked in ("call it", "say it", f"my key is {KEY}")
    ]
    called, said, _ = entries
    assert said.answer
    assert said.answer.text == "It is [removed]."
    tokenizer = tokenizer_of("qwen3")
    assert tokenizer.raw(called.tokens(tokenizer, family_named("qwen3"))) == (
        '<think>\nHm.\n</think>\n\n<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
    )
    mistral = tokenizer_of("mistral")
    assert mistral.raw(called.tokens(mistral, family_named("mistral"))) == (
        '[THINK]Hm.[/THINK][TOOL_CALLS]f[ARGS]{"a": "é"}'
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("nobody knows", r"refused request 2 \(HTTP 404\): No\."),
        ("break it", "The answer to request 2 is not in the format"),
    ],
)
def test_an_upstream_that_fails_is_named(
    tmp_path: Path, upstream: str, asked: str, message: str
) -> None:
    result = record(tmp_path, upstream, ["call it", asked])
    assert isinstance(result.exception, ServerError)
    with pytest.raises(ServerError, match=message):
        raise result.exception


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "ftp://127.0.0.1/v1", "their-server"])
def test_an_upstream_that_is_not_there_is_named(tmp_path: Path, url: str) -> None:
    result = record(tmp_path, url, ["call it"])
    assert isinstance(result.exception, ServerError)
    assert "at --upstream did not answer request 1" in result.exception.message


def test_a_key_that_is_not_set_is_named(tmp_path: Path, upstream: str) -> None:
    result = record(tmp_path, upstream, ["call it"], "--api-key-env", "NO_SUCH_KEY")
    assert isinstance(result.exception, ServerError)
    assert "NO_SUCH_KEY" in result.exception.message
    assert not Upstream.asked


SECRETS = [
    "sk-proj-abcdefghijklmnop1234",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "hf_abcdefghijklmnopqrstuvwx",
    "AKIAABCDEFGHIJKLMNOP",
    "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
    "Bearer abcdefghijklmnop.qrst",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_removed_wherever_it_stands(secret: str) -> None:
    found = {"text": f"It is {secret}.", "calls": [{"arguments": {"a": [secret, 5, None]}}]}
    assert secret not in str(without_secrets(found))
    assert without_secrets(found)["text"] == "It is [removed]."


def test_other_text_stays() -> None:
    text = "An sk-1 cable, a risk-averse_bearer of news, and a task-oriented-approach."
    assert without_secrets(text) == text
    assert matching(text) == text
