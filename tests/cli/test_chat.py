"""`mlx-server chat` against a server made of lines, and with a server of its own."""

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from mlx_server.clients import chat as chatting
from mlx_server.clients.chat import Chat, client_of, connected, converse, picture_part
from mlx_server.errors import (
    BadRequest,
    GenerationFailed,
    ServerError,
    SettingsError,
    Unauthorized,
    Unavailable,
)
from mlx_server.events import ReasoningDelta, TextDelta
from mlx_server.system.listening_sockets import DEFAULT_URL
from tests.hostile.upstreams import RawServer, key_of
from tests.live.fork_server import ran

NO_URLS = [
    *("", "their-server", "127.0.0.1:1", "ftp://127.0.0.1", "://", "http://", "file:///etc/hosts"),
    *("http://a:99999", "http://a:-1", "http://a:b", "http://[::1", "http://..", "http://a\nb"),
    *("me:hunter2@host", "http://me:hunter2@host:x", "http://\x1b[31m", f"http://{'a' * 64}"),
    "http://\udcff",
]
"""What is not the URL of a server."""

pytestmark = pytest.mark.usefixtures("folder")


def delta(**fields: str) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': fields}]})}\n\n"


def reply(body: str, status: int = 200, length: int = 0) -> bytes:
    """length: what it says that its body has."""
    said = f"Content-Length: {length}\r\n" if length else ""
    return f"HTTP/1.0 {status} x\r\n{said}\r\n{body}".encode()


class Fake(RawServer):
    """Plays replies in order and then holds every stream open until its client leaves."""

    def __init__(self, *replies: bytes) -> None:
        self.replies = list(replies)
        self.requests: list[dict[str, Any]] = []
        self.left = threading.Event()
        super().__init__(tuple)

    def reply(self, head: str, body: bytes) -> Iterable[bytes]:
        path = head.split()[1]
        if path == "/v1/models":
            models = [{"id": "embeds", "type": "embeddings"}, {"id": "first"}, {"id": "second"}]
            return (reply(json.dumps({"data": models})),)
        if head.startswith("GET"):
            name = path.removeprefix("/v1/models/")
            error = {"message": f"{name} is not served.", "code": "model_not_found"}
            missing = {"error": error} if name == "nope" else {"detail": "Not Found"}
            return (reply(json.dumps(missing), 404),)
        asked = json.loads(body)
        assert path == ("/v1/responses" if "input" in asked else "/v1/chat/completions")
        self.requests.append({**asked, "key": key_of(head)})
        return (self.replies.pop(0),) if self.replies else self._until_left()

    def _until_left(self) -> Iterator[bytes]:
        try:
            yield reply(delta(content="partial"))
            while not self.left.wait(0.05):
                yield b": ping\n\n"
        finally:
            self.left.set()


Serve = Callable[..., Fake]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as servers:
        yield lambda *replies: servers.enter_context(closing(Fake(*replies)))


DONE = "data: [DONE]\n\n"


@pytest.fixture
def nothing_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setattr(chatting, "DEFAULT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")


def test_chat_remembers_and_forgets(serve: Serve) -> None:
    server = serve(*[reply(delta(content=text) + DONE) for text in ("one", "two", "three")])
    lines = iter(["hi", "again", "/reset", "", "anew", "/exit", "never read"])
    said: list[str] = []
    with client_of(server.url, "k") as client:
        chat = Chat(client, "m", "Be brief.", {"temperature": 0.0})
        converse(chat, lambda: next(lines), lambda piece: said.append(piece.text), said.append)
    system = {"role": "system", "content": "Be brief."}
    turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "one"}]
    assert [request["messages"] for request in server.requests] == [
        [system, {"role": "user", "content": "hi"}],
        [system, *turn, {"role": "user", "content": "again"}],
        [system, {"role": "user", "content": "anew"}],
    ]
    fields = {"model": "m", "stream": True, "temperature": 0.0, "key": "Bearer k"}
    assert server.requests[0].items() >= fields.items()
    assert next(lines) == "never read"


def test_a_picture_goes_with_the_first_message_that_is_answered(
    serve: Serve, tmp_path: Path
) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"\x89PNG")
    server = serve(reply(OPENAI_ERROR, 503), *[reply(delta(content="yes") + DONE)] * 2)
    lines = iter(["lost", "what?", "and?", "/exit"])
    with client_of(server.url, None) as client:
        chat = Chat(client, "m", pictures=[picture_part(file)])
        converse(chat, lambda: next(lines), lambda _: None, lambda _: None)
    seen = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
    _, second, third = ([m["content"] for m in r["messages"]] for r in server.requests)
    assert second == [[seen, {"type": "text", "text": "what?"}]]
    assert third == [*second, "yes", "and?"]
    with pytest.raises(BadRequest, match="can't be read"):
        picture_part(tmp_path / "none.png")


@pytest.mark.slow
def test_text_and_reasoning_are_told_apart(serve: Serve) -> None:
    stream = ": keep-alive\n\n" + delta(role="assistant", content="")
    stream += delta(reasoning_content="hm", reasoning="hm") + delta(content="yes") + DONE
    server = serve(reply(stream), reply(stream))
    with client_of(server.url, None) as client:
        assert list(Chat(client, "m").say("?")) == [ReasoningDelta(0, "hm"), TextDelta(0, "yes")]
    assert ran("chat", "--url", server.url, stdin="?").stdout == "yes\n"


def event(kind: str, **fields: object) -> str:
    return f"data: {json.dumps({'type': kind, **fields})}\n\n"


def test_with_a_connector_the_server_runs_its_tools(serve: Serve) -> None:
    listed = {"type": "mcp_list_tools", "server_label": "my_web", "error": "It is not there."}
    call = {"type": "mcp_call", "name": "search", "arguments": "{}", "output": "It snows."}
    answered = (
        event("response.output_item.done", item=listed)
        + event("response.reasoning_text.delta", delta="hm")
        + event("response.output_item.done", item=call)
        + event("response.output_text.delta", delta="Snow.")
        + event("response.completed", response={})
    )
    broken = event("response.failed", response={"error": {"message": "Too late."}})
    server = serve(reply(answered), reply(broken), reply(event("response.output_text.delta")))
    with client_of(server.url, None) as client:
        chat = Chat(client, "m", "Brief.", {"max_tokens": 9}, ["my web"])
        assert list(chat.say("Weather?")) == [
            ReasoningDelta(0, "\n[my_web has no tools: It is not there.]\n"),
            ReasoningDelta(0, "hm"),
            ReasoningDelta(0, "\n[search {}]\n"),
            TextDelta(0, "Snow."),
        ]
        for message in ("Too late", "ended before the answer did"):
            with pytest.raises(GenerationFailed, match=message):
                list(chat.say("And then?"))
    first, second, _ = server.requests
    assert first["tools"] == [
        {
            "type": "mcp",
            "connector_id": "my web",
            "server_label": "my_web",
            "require_approval": "never",
        }
    ]
    assert (first["store"], first["max_output_tokens"]) == (False, 9)
    assert [each["content"] for each in second["input"]] == [
        "Brief.",
        "Weather?",
        "Snow.",
        "And then?",
    ]


OPENAI_ERROR = json.dumps({"error": {"message": "The queue is full.", "code": "overloaded"}})


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (reply(OPENAI_ERROR, 503), BadRequest, r"The queue is full\. \(HTTP 503\)"),
        (reply(OPENAI_ERROR, 401), Unauthorized, "--api-key"),
        (reply("<html>", 502), BadRequest, r"not OpenAI-compatible.*\(HTTP 502\)"),
        (reply("[1]", 400), BadRequest, "not OpenAI-compatible"),
        (reply(delta(content="a") + f"data: {OPENAI_ERROR}\n\n{DONE}"), GenerationFailed, "full"),
        (reply(delta(content="a")), GenerationFailed, "ended before the answer did"),
        (reply(delta(content="a"), length=999), GenerationFailed, "connection .* failed"),
        (reply("data: {oops\n\n"), GenerationFailed, "not in the format"),
        (reply("data: 5\n\n"), GenerationFailed, "not in the format"),
        (reply(f"data: {'[' * 100_000}\n\n"), GenerationFailed, "not in the format"),
        (reply("[" * 100_000, 500), BadRequest, "not OpenAI-compatible"),
    ],
)
def test_a_failed_answer_is_told_and_forgotten(
    answer: bytes, error: type[ServerError], message: str, serve: Serve
) -> None:
    server = serve(answer)
    with client_of(server.url, None) as client:
        chat = Chat(client, "m")
        with pytest.raises(error, match=message):
            list(chat.say("hi"))
        assert chat.turns == []


def test_an_error_does_not_end_the_chat(serve: Serve) -> None:
    server = serve(reply(OPENAI_ERROR, 503), reply(delta(content="fine") + DONE))
    lines, notes = iter(["hi", "hi", "/what", "/exit"]), list[str]()
    with client_of(server.url, None) as client:
        converse(Chat(client, "m"), lambda: next(lines), lambda _: None, notes.append)
    assert "The queue is full." in notes[0]
    assert notes[2].startswith("Unknown command")
    assert [request["messages"] for request in server.requests] == [
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": "hi"}],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("named", "stdin"), [([], "hi\n"), (["first", "hi"], "unread")])
def test_one_question_prints_the_answer_only(serve: Serve, named: list[str], stdin: str) -> None:
    server = serve(reply(delta(content="Hel") + delta(content="lo \ud83d") + DONE))
    result = ran("chat", *named, "--url", server.url + "/v1/", stdin=stdin)
    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello ?\n", "")
    assert server.requests[0]["model"] == "first"
    assert server.requests[0]["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.slow
def test_piped_chat_fails_with_1(serve: Serve) -> None:
    cut = ran("chat", "m", "--url", serve(reply(delta(content="Hel"))).url, stdin="hi")
    assert (cut.returncode, cut.stdout) == (1, "Hel")
    assert "ended before the answer did" in cut.stderr
    empty = ran("chat", stdin=" \n")
    assert (empty.returncode, empty.stdout) == (1, "")
    assert "no question" in empty.stderr
    assert "Traceback" not in cut.stderr + empty.stderr


def test_an_unusable_url_or_key(nothing_at_home: None) -> None:
    silent = DEFAULT_URL.replace("127.0.0.1", "127.0.0.2")
    with pytest.raises(Unavailable, match="mlx-server serve"), connected(silent, None, None):
        pass
    for url in NO_URLS:
        with pytest.raises(SettingsError) as wrong, connected(url, None, "m"):
            pass
        assert "hunter2" not in wrong.value.message
    with pytest.raises(BadRequest) as error:
        client_of("http://127.0.0.1", "sk-secret\n")
    assert "sk-secret" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("typed", [b"", b"/exi"])
def test_ctrl_c_stops_the_answer_and_neither_the_chat_nor_what_is_typed(
    serve: Serve, typed: bytes
) -> None:
    server = serve()
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "mlx_server", "chat", "m", "--url", server.url]
    with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside) as child:
        os.close(inside)
        expect(terminal, b"> ")
        os.write(terminal, b"hi\n")
        expect(terminal, b"partial")
        os.write(terminal, typed)
        child.send_signal(signal.SIGINT)
        expect(terminal, b"Stopped.")
        assert server.left.wait(10)
        expect(terminal, typed or b"> ")
        os.write(terminal, b"/exit\n".removeprefix(typed))
        assert child.wait(10) == 0
    os.close(terminal)


@pytest.mark.slow
def test_blocks_are_one_message_and_markdown_is_shown_as_such(serve: Serve) -> None:
    titled = reply(delta(content="# Title\n\nIt is **bold**.\n\n```\ncode") + DONE)
    server = serve(titled, reply(delta(content="two") + DONE), reply(delta(content="three") + DONE))
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "mlx_server", "chat", "--url", server.url]
    with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside) as child:
        os.close(inside)
        expect(terminal, b"> ")
        os.write(terminal, b"one\nblock\n")
        expect(terminal, b"code")
        expect(terminal, b"> ")
        os.write(terminal, b"goes \\\n")
        os.write(terminal, b"on\n")
        expect(terminal, b"two")
        expect(terminal, b"> ")
        os.write(terminal, b'"""quoted\n\nlines"""\n')
        expect(terminal, b"three")
        expect(terminal, b"> ")
        os.write(terminal, b"/exit\n")
        assert child.wait(10) == 0
    os.close(terminal)
    asked = [request["messages"][-1]["content"] for request in server.requests]
    assert asked == ["one\nblock", "goes \non", "quoted\n\nlines"]
    assert server.requests[0]["model"] == "first"


@pytest.mark.slow
def test_a_model_that_is_not_there_is_told_at_once(serve: Serve) -> None:
    result = ran("chat", "nope", "--url", serve().url, stdin="hi")
    assert (result.returncode, result.stdout) == (1, "")
    assert "nope is not served." in result.stderr


def expect(terminal: int, wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], 20)
        assert ready, f"{wanted!r} did not come, but {seen!r}"
        seen += os.read(terminal, 1)


OWN = """
import os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Wire(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "a"}]}')
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        key = os.environ["MLX_SERVER_API_KEYS"]
        right = self.headers["Authorization"] == f"Bearer {key}"
        self.send_response(200 if right else 401)
        self.end_headers()
        text = " ".join(sys.argv[1:])
        self.wfile.write(b'data: {"choices": [{"delta": {"content": "%s"}}]}\\n\\n' % text.encode())
        self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *_): pass

server = HTTPServer(("127.0.0.1", 0), Wire)
print("Loading", flush=True)
print(f"Listening on http://127.0.0.1:{server.server_port}", flush=True)
print("x" * 200_000, flush=True)
server.serve_forever()
"""


@pytest.mark.slow
def test_without_a_server_the_chat_starts_its_own(
    nothing_at_home: None, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("MLX_SERVER_API_KEYS", "not-for-this-one")
    monkeypatch.setattr(chatting, "SERVE", [sys.executable, "-c", OWN])
    Path("models.yaml").write_text("models: {a: {source: x/y, aliases: [b]}}\n")
    wanted = [(None, "a", ""), ("b", "b", ""), ("org/name", "org/name", "org/name")]
    wanted += [("./c", "c", "./c")]
    for model, expected, arguments in wanted:
        with connected(None, None, model) as (client, model_id):
            assert model_id == expected
            assert "".join(d.text for d in Chat(client, model_id).say("hi")) == arguments
        with pytest.raises(Unavailable), client_of(str(client.base_url), None) as after:
            chatting.first_model(after)


@pytest.mark.slow
def test_an_own_server_ends_with_a_killed_chat(folder: Path) -> None:
    program = (
        "import sys; from mlx_server.clients.chat import own_server\n"
        f"with own_server([sys.executable, '-c', {OWN!r}]) as (url, key):\n"
        "    print(url, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout
        assert child.stdin
        url = child.stdout.readline().strip()
        # A terminal that closes brings both. The end of its input also wakes a read that began
        # just after the signal came, and which the signal could not interrupt any more.
        child.send_signal(signal.SIGHUP)
        child.stdin.close()
        assert child.wait(10) == 128 + signal.SIGHUP
    with pytest.raises(Unavailable), client_of(url, None) as client:
        chatting.first_model(client)
