"""A server of recorded answers on loopback, which keeps the requests that it got."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Wire = dict[str, Any]

Recorded = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A body or, as a list, the chunks of a stream."""


@dataclass
class RecordedServer:
    url: str
    answers: list[Recorded]
    requests: list[Wire] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    models: Any = None
    """What it answers to GET /models; None: nothing is there."""
    lists: int = 0
    """How often it was asked for that."""


@contextmanager
def recorded(*answers: Recorded) -> Iterator[RecordedServer]:
    """Answers in turn, and fails if one is left."""
    server = RecordedServer("", list(answers))

    class Player(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.lists += 1
            text = server.models if isinstance(server.models, str) else json.dumps(server.models)
            self._send("application/json", text, error=server.models is None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.requests.append(json.loads(body))
            server.paths.append(self.path)
            server.keys.append(self.headers["Authorization"])
            answer = server.answers.pop(0)
            if isinstance(answer, Mapping):
                self._send("application/json", json.dumps(answer), answer.get("error"))
            else:
                lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in answer]
                self._send("text/event-stream", "".join([*lines, "data: [DONE]\n\n"]))

        def _send(self, kind: str, text: str, error: Any = None) -> None:
            self.send_response(400 if error else 200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *arguments: Any) -> None:
            """Keeps quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Player) as listening:
        listening.daemon_threads = True
        thread = Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        server.url = f"http://127.0.0.1:{listening.server_port}/v1"
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()
    assert server.answers == [], "these answers were not asked for"


def completion(content: str | None = "", *, reason: str = "stop", **message: Any) -> Wire:
    said = {"role": "assistant", "content": content, **message}
    choice = {"index": 0, "message": said, "finish_reason": reason}
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    return {"id": "chatcmpl-1", "model": "m", "choices": [choice], "usage": usage}


def chunks(*deltas: Wire, reason: str = "stop") -> list[Wire]:
    made: list[Wire] = [{"index": 0, "delta": d, "finish_reason": None} for d in deltas]
    made.append({"index": 0, "delta": {}, "finish_reason": reason})
    return [{"id": "chatcmpl-1", "model": "m", "choices": [choice]} for choice in made]


def call(name: str, arguments: Any, id: str = "call_1") -> Wire:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER: Wire = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
