"""An upstream whose answers are recorded, and the command that records them."""

import json
from collections.abc import Iterable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner, Result

from mlx_server.cli import app
from tests.hostile.upstreams import RawServer, http_answer, key_of

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


def record(folder: Path, url: str, requests: list[Any], *options: str) -> Result:
    (folder / "asked.yaml").write_text(yaml.safe_dump(requests))
    named = ("--requests", str(folder / "asked.yaml"), "--output", str(folder / "said.yaml"))
    command = ["replay", "record", "their/model", "--upstream", url, *named, *options]
    return CliRunner().invoke(app, command)
