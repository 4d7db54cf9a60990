"""`mlx-server replay record`: of models, of other servers, and of what an app asks."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from mlx_server.cli import app
from mlx_server.cli.replay import recorded_settings, secrets_of
from mlx_server.errors import ServerError, SettingsError
from mlx_server.families import family_named
from mlx_server.messages import Conversation, Message
from mlx_server.sources.transcript import read_transcript
from tests.families.goldens import tokenizer_of
from tests.hostile.upstreams import RawServer, http_answer, key_of
from tests.tables import cases
from tests.upstream.playing import KEY as UPSTREAM_KEY
from tests.upstream.playing import KEY_VARIABLE

KEY = "not-of-any-known-form-1"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
MESSAGES: dict[str, dict[str, Any]] = {
    "call it": {"content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
    "say it": {"content": "It is sk-abcdefghijklmnopqrst.", "reasoning": "Well."},
    "break it": {"content": 5},
    f"my key is {KEY}": {"content": f"{KEY}?"},
}


class Upstream(RawServer):
    requests: list[tuple[str | None, dict[str, Any]]]
    """Keys and bodies."""

    def reply(self, head: str, body: bytes) -> Iterable[bytes]:
        if head.startswith("GET"):
            return super().reply(head, body)
        self.requests.append((key_of(head), json.loads(body)))
        asked = self.requests[-1][1]["messages"][-1]["content"]
        if asked == "never end":
            return chain([b"HTTP/1.0 200 OK\r\n\r\n"], repeat(b" " * (1 << 20)))
        if message := MESSAGES.get(asked):
            choice = {"message": message, "finish_reason": "stop"}
            return (http_answer(json.dumps({"choices": [choice]})),)
        return (http_answer(json.dumps({"error": {"message": "No."}}), 404),)


@pytest.fixture
def upstream() -> Iterator[str]:
    Upstream.requests = []
    with closing(Upstream(tuple)) as server:
        yield f"{server.url}/v1"


def record(folder: Path, url: str, requests: list[Any], *options: str) -> Result:
    (folder / "asked.yaml").write_text(yaml.safe_dump(requests))
    named = ("--requests", str(folder / "asked.yaml"), "--output", str(folder / "said.yaml"))
    command = ["replay", "record", "their/model", "--upstream", url, *named, *options]
    return CliRunner().invoke(app, command)


pytestmark = pytest.mark.usefixtures("folder")


def recorded(*options: str) -> Result:
    return CliRunner().invoke(app, ["replay", "record", "their/model", *options])


def test_a_transcript_without_a_file_is_printed_alone(folder: Path, upstream: str) -> None:
    (folder / "asked.yaml").write_text(yaml.safe_dump(["say it"]))
    result = recorded("--upstream", upstream, "--requests", "asked.yaml")
    assert result.exit_code == 0, result.output
    assert [entry["match"] for entry in yaml.safe_load(result.stdout)] == ["say it"]
    assert result.stderr.startswith("'say it': "), "progress is no part of it"
    assert recorded("--upstream", upstream, "--requests", "asked.yaml", "--output", "x.yaml")
    assert (folder / "x.yaml").read_text("utf-8") == result.stdout


def test_a_key_that_is_not_set_is_named(
    folder: Path, upstream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (None, ""):
        monkeypatch.delenv("NO_SUCH_KEY", raising=False)
        if value is not None:
            monkeypatch.setenv("NO_SUCH_KEY", value)
        result = record(folder, upstream, ["call it"], "--api-key-env", "NO_SUCH_KEY")
        assert isinstance(result.exception, ServerError)
        assert "NO_SUCH_KEY" in result.exception.message
    assert not Upstream.requests


def test_a_server_that_records_needs_a_file_for_it(upstream: str) -> None:
    result = recorded("--upstream", upstream)
    assert result.exit_code == 2
    assert "--output FILE is needed" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--requests", "gone.yaml"), "--requests"),
        (("--requests", "."), "--requests"),
        (("--requests", "asked.yaml", "--output", "no/such/folder.yaml"), "no such folder"),
        (("--requests", "asked.yaml", "--output", "."), "--output"),
        (("--requests", "asked.yaml", "--output", "loop"), "can't be written: Too many"),
        (("--requests", "asked.yaml", "--output", "x" * 300), "can't be written: File name too"),
        (("--requests", "asked.yaml", "--output", "asked.yaml/x"), "no such folder"),
    ],
)
def test_a_file_that_can_not_be_read_or_written_is_named_before_anything_is_asked(
    folder: Path, upstream: str, options: tuple[str, ...], said: str
) -> None:
    (folder / "asked.yaml").write_text(yaml.safe_dump(["say it"]))
    (folder / "loop").symlink_to("loop")
    result = recorded("--upstream", upstream, *options)
    assert result.exit_code == 2, result.exception
    assert said in result.stderr
    assert not Upstream.requests


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("asked.yaml", b"- [say it"),
        ("asked.yaml", b"- \xff"),
        ("asked.yaml", b"5"),
        ("asked.yaml", b"- 5"),
        ("asked.jsonl", b'{"messages": []'),
        ("asked.ndjson", b'"say it"\nsay it\n'),
        ("asked.jsonl", b"[" * 200_000),
        ("asked.jsonl", b"9" * 5000),
        ("asked.jsonl", b'"say it \\ud800"\r\n'),
        ("asked.yaml", bytes(range(256))),
        ("asked.yaml", b"- messages: &all [*all]"),
        ("asked.yaml", b"- messages: [{role: user, content: 2026-11-29}]"),
    ],
)
def test_what_is_no_list_of_requests_is_an_error_in_a_sentence(
    folder: Path, upstream: str, name: str, content: bytes
) -> None:
    (folder / name).write_bytes(content)
    result = recorded("--upstream", upstream, "--requests", name)
    assert isinstance(result.exception, ServerError), result.exception
    assert not Upstream.requests


def test_lines_of_json_are_requests_too(folder: Path, upstream: str) -> None:
    system = {"role": "system", "content": "a\u2028b\x85c"}
    body: Any = {"messages": [system, {"role": "user", "content": "call it"}]}
    lines = [json.dumps("say it"), "", json.dumps(body, ensure_ascii=False)]
    (folder / "asked.jsonl").write_bytes("\r\n".join(lines).encode())
    result = recorded("--upstream", upstream, "--requests", "asked.jsonl")
    assert [entry["match"] for entry in yaml.safe_load(result.stdout)] == ["say it", "call it"]


def test_an_endless_file_is_refused(folder: Path, upstream: str) -> None:
    result = recorded("--upstream", upstream, "--requests", "/dev/zero")
    assert isinstance(result.exception, ServerError)
    assert "larger than" in result.exception.message


def test_a_transcript_replaces_a_file_only_when_it_is_whole(
    folder: Path, upstream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    (folder / "asked.yaml").write_text(yaml.safe_dump(["say it"]))
    (folder / "old.yaml").write_text("old")
    (folder / "old.yaml").chmod(0o600)
    (folder / "link").symlink_to("old.yaml")
    options = ("--upstream", upstream, "--requests", "asked.yaml", "--output", "link")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", stop)
        assert isinstance(recorded(*options).exception, OSError)
    assert (folder / "old.yaml").read_text() == "old"
    assert recorded(*options).exit_code == 0
    assert yaml.safe_load((folder / "old.yaml").read_text())[0]["match"] == "say it"
    assert (folder / "old.yaml").stat().st_mode & 0o777 == 0o600
    assert (folder / "link").is_symlink()
    assert sorted(each.name for each in folder.iterdir()) == ["asked.yaml", "link", "old.yaml"]


def test_a_recording_plays_in_any_family(
    tmp_path: Path, upstream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)
    body = {"messages": [{"role": "user", "content": "call it"}], "temperature": 0}
    tools = [{"type": "function", "function": {"name": "f"}}]
    options = ("--api-key-env", "THEIR_KEY")
    asked = [{**body, "tools": tools}, "say it", f"my key is {KEY}"]
    result = record(tmp_path, upstream, asked, *options)
    assert result.exit_code == 0, result.output
    sent_key, sent = Upstream.requests[0]
    assert sent_key == f"Bearer {KEY}"
    assert {**sent, **body, "model": "their/model"} == sent
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


def test_a_server_that_records_has_the_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, UPSTREAM_KEY)
    config = tmp_path / "models.yaml"
    listed = {"source": "openai+http://127.0.0.1:1/v1", "upstream_model": "theirs"}
    models = {"mine": {**listed, "aliases": ["own"], "api_key_env": KEY_VARIABLE}, "other": listed}
    config.write_text(yaml.safe_dump({"models": models, "server": {"port": 1234}}))
    settings = recorded_settings("own", config, None, None, None)
    assert (list(settings.models), settings.server.port) == (["mine"], 1234)
    assert secrets_of(settings) == [UPSTREAM_KEY]
    given = recorded_settings("a/b", config, "http://127.0.0.1:2/v1/", KEY_VARIABLE, 99)
    assert list(given.models) == ["a/b"]
    assert given.models["a/b"].source == "openai+http://127.0.0.1:2/v1"
    assert (given.models["a/b"].upstream_model, given.server.port) == ("a/b", 99)
    assert list(recorded_settings(str(tmp_path), config, None, None, None).models) == [
        tmp_path.name
    ]


@cases
def test_what_can_not_be_recorded(
    tmp_path: Path, model: str, url: str, variable: str | None, said: str
) -> None:
    with pytest.raises(SettingsError) as wrong:
        recorded_settings(model, None, url, variable, None)
    assert wrong.value.message.startswith(said)
    assert "hunter2" not in wrong.value.message


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("nobody knows", r"does not know the model or the route \(status 404\)"),
        ("never end", "sent a body that is too long"),
        ("break it", "sent a `content` that is not text"),
    ],
)
def test_an_upstream_that_fails_is_named(
    tmp_path: Path, upstream: str, asked: str, message: str
) -> None:
    result = record(tmp_path, upstream, ["say it", asked])
    assert isinstance(result.exception, ServerError)
    with pytest.raises(ServerError, match=message):
        raise result.exception
