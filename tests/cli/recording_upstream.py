"""An upstream whose answers are recorded, and the command that records them."""

import json
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner, Result

from mlx_server.cli import app

KEY = "not-of-any-known-form-1"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
MESSAGES: dict[str, dict[str, Any]] = {
    "call it": {"content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
    "say it": {"content": "It is sk-abcdefghijklmnopqrst.", "reasoning": "Well."},
    "break it": {"content": 5},
    f"my key is {KEY}": {"content": f"{KEY}?"},
}


class Upstream(BaseHTTPRequestHandler):
    asked: list[tuple[str | None, dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.headers["Authorization"], body))
        message = MESSAGES.get(body["messages"][-1]["content"])
        found = (
            {"choices": [{"message": message, "finish_reason": "stop"}]}
            if message
            else {"error": {"message": "No."}}
        )
        sent = json.dumps(found).encode()
        if body["messages"][-1]["content"] == "never end":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(b" " * (1 << 20))
            return
        self.send_response(200 if message else 404)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def record(folder: Path, url: str, requests: list[Any], *options: str) -> Result:
    (folder / "asked.yaml").write_text(yaml.safe_dump(requests))
    named = ("--requests", str(folder / "asked.yaml"), "--output", str(folder / "said.yaml"))
    command = ["replay", "record", "their/model", "--upstream", url, *named, *options]
    return CliRunner().invoke(app, command)
