"""An upstream whose answers are recorded, and the command that records them."""

import json
import re
from collections.abc import Iterable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner, Result

from mlx_server.cli import app
from tests.hostile.upstreams import RawServer

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
        key = re.search(r"(?i)^authorization: (.+)$", head, re.MULTILINE)
        self.requests.append((key and key[1].strip(), json.loads(body)))
        asked = self.requests[-1][1]["messages"][-1]["content"]
        if asked == "never end":
            return chain([b"HTTP/1.0 200 OK\r\n\r\n"], repeat(b" " * (1 << 20)))
        status, found = b"404 None", dict[str, Any](error={"message": "No."})
        if message := MESSAGES.get(asked):
            status, found = b"200 OK", {"choices": [{"message": message, "finish_reason": "stop"}]}
        sent = json.dumps(found).encode()
        return (b"HTTP/1.0 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(sent), sent),)


def record(folder: Path, url: str, requests: list[Any], *options: str) -> Result:
    (folder / "asked.yaml").write_text(yaml.safe_dump(requests))
    named = ("--requests", str(folder / "asked.yaml"), "--output", str(folder / "said.yaml"))
    command = ["replay", "record", "their/model", "--upstream", url, *named, *options]
    return CliRunner().invoke(app, command)
