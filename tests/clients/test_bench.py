"""The load generator against a server that plays scripts: what it counts, not how long it takes."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_server.clients import bench
from mlx_server.clients.bench import COLUMNS, Api, Result, Target, Workload, measure, run, words_for
from tests.hostile.upstreams import RawServer
from tests.live.fork_server import ran

DONE = "data: [DONE]\n\n"
PLAIN = "HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNKED = "HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"

Script = Callable[[dict[str, Any]], list[str]]
"""From the request's body to the pieces in which the answer is sent."""


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def text(content: str = " so", name: str = "content") -> str:
    return event(choices=[{"index": 0, "delta": {name: content}}])


def usage(prompt: int, completion: int) -> str:
    details = {"accepted_prediction_tokens": completion // 2}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event(choices=[], usage={**counts, "completion_tokens_details": details})


def chunked(*pieces: str) -> list[str]:
    sized = [f"{len(piece.encode()):x}\r\n{piece}\r\n" for piece in pieces]
    return [CHUNKED, *sized, "0\r\n\r\n"]


STORY = (text(""), text(" a"), text(" b"), text(" c"), usage(9, 4), DONE)


class Server(RawServer):
    """Keeps what it is asked."""

    def __init__(self, script: Script) -> None:
        super().__init__(tuple)
        self._script = script
        self.heads: list[str] = []
        self.bodies: list[dict[str, Any]] = []

    def reply(self, head: str, body: bytes) -> Iterable[bytes]:
        if head.startswith("GET /v1/models "):
            models = json.dumps({"data": [{"id": "first"}, {"id": "second"}]})
            return (f"HTTP/1.0 200 OK\r\n\r\n{models}".encode(),)
        self.heads.append(head)
        self.bodies.append(json.loads(body or "{}"))
        return map(str.encode, self._script(self.bodies[-1]))


Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Server] = []

    def start(*pieces: str, script: Script | None = None) -> Server:
        servers.append(Server(script or (lambda _: list(pieces))))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def asked(server: Server, *, clients: int = 1, requests: int = 1, api: Api = "chat") -> Result:
    target = Target(server.url, "m", api=api)
    return asyncio.run(run(target, Workload(clients, requests, words=5, max_tokens=4)))


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("whole", ["".join(chunked(*STORY)), PLAIN + "".join(STORY)])
def test_counts_do_not_depend_on_how_the_stream_is_cut(serve: Serve, whole: str, size: int) -> None:
    whole = (
        whole.replace("\n\ndata", "\n\n: a comment\n\ndata") if whole.startswith(PLAIN) else whole
    )
    (answer,) = asked(serve(*(whole[i : i + size] for i in range(0, len(whole), size)))).answers
    assert (answer.tokens, answer.prompt_tokens, len(answer.gaps)) == (4, 9, 2)


REFUSED = '{"error": {"message": "too many"}}'


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([f"HTTP/1.1 503 No\r\nConnection: close\r\n\r\n{REFUSED}"], "HTTP 503: too many"),
        (["HTTP/1.0 404 No\r\n\r\nwhat?"], "HTTP 404, without an error"),
        ([PLAIN, text(), event(error={"message": "the engine died"}), DONE], "the engine died"),
        ([PLAIN, "data: 5\n\n"], "The answer is not in the format"),
        ([PLAIN, text(), DONE[:-9]], "The answer was cut off."),
        ([*chunked(text(), text())[:-1], "5\r\ndat"], "The connection broke: "),
        ([], "The connection broke: "),
        ([PLAIN, text(""), usage(9, 1), DONE], "The answer has no text."),
    ],
)
def test_what_is_no_whole_answer_is_an_error(serve: Serve, pieces: list[str], error: str) -> None:
    result = asked(serve(*pieces))
    assert not result.answers
    assert len(result.errors) == 1
    assert result.errors[0].startswith(error)


def test_an_answer_that_never_ends(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()
    monkeypatch.setattr(bench, "ANSWER_SECONDS", 0.05)

    def script(_: dict[str, Any]) -> list[str]:
        hold.wait()
        return []

    (error,) = asked(serve(script=script)).errors
    hold.set()
    assert error == "The connection broke: no end after 0.05 s"


def test_what_is_asked(serve: Serve) -> None:
    server = serve(PLAIN, *STORY)
    load = Workload(1, 1, words=5, max_tokens=4)
    asyncio.run(run(Target(f"{server.url}/v1/", "m", "key"), load))
    asyncio.run(run(Target(server.url, "m", api="completions"), load))
    chat, completion = server.bodies
    assert chat["messages"][0]["content"].startswith(load.prompt(0))
    assert completion["prompt"] == load.prompt(0)
    for body in (chat, completion):
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 4, 0)
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
    assert server.heads[0].startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer key\r\n" in server.heads[0]
    assert server.heads[1].startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "Authorization" not in server.heads[1]


def counting(body: dict[str, Any]) -> list[str]:
    """A tokenizer with two tokens a word, and a template of ten."""
    words = len(body["prompt"].split())
    return [PLAIN, text(), usage(10 + 2 * words, 1), DONE]


def test_prompts_get_the_length_that_the_server_counts(serve: Serve) -> None:
    target = Target(serve(script=counting).url, "m", api="completions")
    assert asyncio.run(words_for(target, [64, 512, 3])) == [27, 251, 1]
    silent = Target(serve(PLAIN, text(), DONE).url, "m")
    assert asyncio.run(words_for(silent, [64, 512])) == [64, 512]


def test_every_length_with_every_number_of_clients(serve: Serve) -> None:
    server = serve(script=counting)
    target = Target(server.url, "m", api="completions")
    results = list(measure(target, [1, 3], [30, 50], 7))
    assert [(r.workload.clients, r.workload.requests) for r in results] == [(1, 4), (3, 6)] * 2
    assert [r.prompt_tokens for r in results] == [30, 30, 50, 50]
    prompts = [body["prompt"] for body in server.bodies if body["max_tokens"] == 7]
    assert len(prompts) == len(set(prompts)) == 20
    (warm,) = measure(target, [2], [30], 7, requests=5, shared_prefix=True)
    measured = [body for body in server.bodies[-5:] if body["max_tokens"] == 7]
    assert warm.workload.requests == len(measured) == 5


@pytest.mark.slow
def test_the_command_prints_a_line_a_case(serve: Serve, tmp_path: Path) -> None:
    server = serve(script=lambda _: chunked(*STORY))
    flags = ["--concurrency", "1,2", "--prompt-tokens", "9", "--max-tokens", "4"]
    result = ran("bench", server.url, *flags, "--api-key", "k", "--requests", "3", folder=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    header, *lines = result.stdout.splitlines()
    assert re.split("  +", header.strip()) == list(COLUMNS)
    assert len(header) <= 80
    cells = [line.split() for line in lines]
    shown = [(c[0], c[1], *c[-2:]) for c in cells]
    assert shown == [(clients, "9", "2.00", "0/3") for clients in ("1", "2")]
    assert {len(line) for line in (header, *lines)} == {len(header)}
    assert {body["model"] for body in server.bodies} == {"first"}
    assert all("Bearer k" in head for head in server.heads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["http://127.0.0.1:1"], 1, "No server answers at http://127.0.0.1:1: "),
        (["http://127.0.0.1:1", "--concurrency", "x"], 2, "--concurrency should be a list like"),
        (
            ["http://127.0.0.1:1", "--prompt-tokens", "9" * 14],
            2,
            "--prompt-tokens should be a list",
        ),
    ],
)
def test_what_can_not_be_measured(
    arguments: list[str], code: int, message: str, tmp_path: Path
) -> None:
    result = ran("bench", *arguments, folder=tmp_path)
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1
