"""Records what a client sends to our server, for `scripts/bench --sessions`.

MLX_CONFORMANCE_RECORD names the folder that gets a file for each client; without it nothing is
kept.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from conformance_parts.anonymous import anonymous
from tests.live.server import LiveServer

FOLDER = "MLX_CONFORMANCE_RECORD"
CHUNK = 1 << 16
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}
SECONDS = 600.0

Json = dict[str, Any]


@dataclass(frozen=True)
class Exchange:
    path: str
    body: Json
    status: int


@contextmanager
def recorded(server: LiveServer, client: str) -> Iterator[LiveServer]:
    """Yields the server at the address that the client has to use."""
    if not (folder := os.environ.get(FOLDER)):
        yield server
        return
    exchanges: list[Exchange] = []
    with proxied(server.port, exchanges) as url:
        yield replace(server, url=url)
    answered = [each for each in exchanges if each.status == 200]
    text = anonymous((each.path, each.body) for each in answered)
    (Path(folder) / f"{client}.json").write_text(text, "utf-8")


@contextmanager
def proxied(port: int, exchanges: list[Exchange]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._forward(b"")

        def do_POST(self) -> None:
            self._forward(self.rfile.read(int(self.headers.get("content-length", 0))))

        def _forward(self, body: bytes) -> None:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP_BY_HOP}
            server = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
            try:
                server.request(self.command, self.path, body or None, headers)
                answer = server.getresponse()
                if body.startswith(b"{"):
                    exchanges.append(Exchange(self.path, json.loads(body), answer.status))
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in HOP_BY_HOP:
                        self.send_header(name, value)
                self.end_headers()
                while piece := answer.read1(CHUNK):
                    self.wfile.write(piece)
            except ConnectionError:
                pass  # the client is gone; closing our connection passes that on
            finally:
                server.close()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}"
        proxy.shutdown()
