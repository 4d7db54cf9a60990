"""`mlx-server batch run` with a running server, and with what is none."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest
from openai import OpenAI
from typer.testing import CliRunner, Result

from mlx_server.cli import app, batch
from mlx_server.errors import ServerError
from tests.live.server import TINY, LiveServer

CHAT = "/v1/chat/completions"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLX_SERVER_API_KEYS", raising=False)
    monkeypatch.setattr(batch, "POLL_SECONDS", 0.02)
    return written(tmp_path / "asked.jsonl", [line(f"{i}") for i in range(5)])


def line(id: str, model: str = TINY, **more: Any) -> dict[str, Any]:
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": id}]}
    return {"custom_id": id, "method": "POST", "url": CHAT, "body": body, **more}


def written(file: Path, lines: Sequence[Any]) -> Path:
    file.write_text("\ufeff" + "".join(f"{json.dumps(each)}\n" for each in lines))
    return file


def run(file: Path, url: str) -> Result:
    return CliRunner().invoke(app, ["batch", "run", str(file), "--url", url])


def beside(file: Path) -> list[str]:
    return sorted(each.name for each in file.parent.iterdir() if each != file)


def ids(file: Path, ending: str) -> list[str]:
    lines = file.with_name(f"{file.name}.{ending}").read_text().splitlines()
    return sorted(json.loads(each)["custom_id"] for each in lines)


def test_each_line_of_a_file_is_answered(server: LiveServer, client: OpenAI, file: Path) -> None:
    lines = [line(f"{i}") for i in range(5)]
    written(file, [*lines, line("bad", "no-such")])
    result = run(file, server.url)
    assert result.exit_code == 1, "one line has no answer"
    assert (ids(file, "output"), ids(file, "errors")) == ([*"01234"], ["bad"])
    result = run(written(file, lines[:2]), f"{server.url}/v1")
    assert result.exit_code == 0, result.output
    assert ids(file, "output") == ["0", "1"]
    assert beside(file) == ["asked.jsonl.output"], "the errors were those of another batch"
    assert "asked.jsonl" not in [each.filename for each in client.files.list(purpose="batch")]


def test_a_command_goes_on_where_another_was_interrupted(
    server: LiveServer, client: OpenAI, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> NoReturn:
        raise KeyboardInterrupt

    before = len([*client.batches.list()])
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", interrupt)
        assert run(file, server.url).exit_code != 0
    assert beside(file) == ["asked.jsonl.batch"]
    with monkeypatch.context() as patch:
        patch.setattr(batch, "client_of", lambda *_: server_of(httpx.Response(503)))
        assert isinstance(run(file, "http://busy").exception, ServerError)
    assert run(file, server.url).exit_code == 0
    assert ids(file, "output") == [*"01234"]
    assert beside(file) == ["asked.jsonl.output"]
    assert len([*client.batches.list()]) == before + 1


@pytest.mark.parametrize("note", ["", "[]", '{"batch": "batch_none"}'])
def test_a_batch_that_the_server_does_not_know_is_begun_again(
    server: LiveServer, file: Path, note: str
) -> None:
    file.with_name("asked.jsonl.batch").write_text(note)
    assert run(file, server.url).exit_code == 0
    assert ids(file, "output") == [*"01234"]


def test_a_file_that_is_no_batch(server: LiveServer, file: Path) -> None:
    result = run(written(file, [line("0"), line("0")]), server.url)
    assert result.exit_code == 1
    assert "line 2: Another line has the same" in " ".join(result.output.split())
    assert beside(file) == []
    wrong: list[list[Any]] = [[], ["x"], [{"body": {}}]]
    for lines in wrong:
        result = run(written(file, lines), server.url)
        assert "The first line of asked.jsonl is no request" in str(result.exception)
    assert run(file.with_name("gone.jsonl"), server.url).exit_code == 2


def server_of(response: httpx.Response) -> httpx.Client:
    transport = httpx.MockTransport(lambda _: response)
    return httpx.Client(base_url="http://other", transport=transport)


@pytest.mark.parametrize(
    ("response", "says"),
    [
        (httpx.Response(507, json={"error": {"message": "No room."}}), r"No room. (HTTP 507)"),
        (httpx.Response(502, text="<html>"), "(HTTP 502)"),
        (httpx.Response(200, text="<html>"), "Check --url. (HTTP 200)"),
        (httpx.Response(200, json={}), "is not mlx-server: it gives no 'id'"),
    ],
)
def test_a_server_that_answers_otherwise_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch, response: httpx.Response, says: str
) -> None:
    monkeypatch.setattr(batch, "client_of", lambda *_: server_of(response))
    result = run(file, "http://other")
    assert isinstance(result.exception, ServerError)
    assert says in result.exception.message
    assert beside(file) == []


def test_without_a_server(file: Path) -> None:
    result = run(file, "http://127.0.0.1:1")
    assert "No server answers at http://127.0.0.1:1" in str(result.exception)
