"""`python -m conformance_parts.picture_sessions CLIENT COMMAND...`, in a network of its own.

A replay model has the client read a picture. What the client then sends is sent again to a tiny
model that sees, without the client's own prompt and tools, which would be most of its context.
It prints a line of JSON, a name and an error.
"""

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from conformance_parts.agent_sessions import MODEL, Session, call, thought
from conformance_parts.claude_sessions import TITLE, Claude
from conformance_parts.codex_sessions import Codex
from conformance_parts.namespaces import raise_loopback
from conformance_parts.recorder import Exchange, proxied
from tests.live.server import LiveServer, serving
from tests.tiny_vision import tiny_vision

SEES, CONTEXT = "sees", 400_000
ASKED = "Look at red.png, and say what is in it."
OWN = ("system", "instructions", "tools", "tool_choice", "thinking", "reasoning")
"""Fields of requests with what a client adds to each conversation."""

Json = dict[str, Any]
Play = Callable[[list[str], LiveServer, Path, Path], None]


def _claude(program: list[str], server: LiveServer, home: Path, work: Path) -> None:
    Claude(program, server, home, work)(ASKED, model=MODEL)


def _codex(program: list[str], server: LiveServer, home: Path, work: Path) -> None:
    codex = Codex(program, home, work)
    codex.configure(server)
    codex("tags", ASKED)


def _opencode(program: list[str], server: LiveServer, home: Path, work: Path) -> None:
    session = Session("opencode", Path(*program), server, home)
    session.connect(MODEL)
    file = home / ".config" / "opencode" / "opencode.json"
    settings = json.loads(file.read_text("utf-8"))
    model = settings["provider"]["mlx-server"]["models"][MODEL]
    model["modalities"]["input"].append("image")  # a replay model reads text alone
    file.write_text(json.dumps(settings), "utf-8")
    session.ask(ASKED)


SESSIONS: Mapping[str, tuple[Play, str, str]] = {
    "claude-code": (_claude, "Read", "file_path"),
    "codex": (_codex, "view_image", "path"),
    "opencode": (_opencode, "read", "filePath"),
}
"""How each client is run, and the tool with which it reads a picture."""


def has_picture(exchange: Exchange) -> bool:
    return "image/png" in (text := json.dumps(exchange.body)) and "base64" in text


def show(server: LiveServer, exchange: Exchange) -> None:
    """Sends a client's request to the model that sees."""
    body = {name: value for name, value in exchange.body.items() if name not in OWN}
    limit = "max_output_tokens" if "input" in body else "max_tokens"
    body |= {"model": SEES, "stream": False, "stream_options": None, limit: 8}
    body |= {
        name: [each for each in body[name] if each.get("role") not in ("system", "developer")]
        for name in ("messages", "input")
        if name in body
    }
    connection = HTTPConnection("127.0.0.1", server.port, timeout=300)
    connection.request(
        "POST", exchange.path, json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 200, text[:500]
    ignored = answer.getheader("x-mlx-server-ignored") or ""
    assert "image" not in ignored, f"the picture is ignored: {ignored}"


def played(client: str, program: list[str], place: Path) -> None:
    play, tool, name = SESSIONS[client]
    home, work = place / "home", place / "home" / "work"
    work.mkdir(parents=True)
    Image.new("RGB", (90, 60), (200, 10, 20)).save(work / "red.png")
    look = call(tool, **{name: str(work / "red.png")})
    title = {"match": "regex:title", "output": "A picture"} if client == "opencode" else TITLE
    says = [title, {"output": thought("I look.") + look}, {"output": "It is red."}]
    (place / "said.jsonl").write_text("\n".join(map(json.dumps, says)), "utf-8")
    config = tiny_vision(place / "sees") / "config.json"
    settings = json.loads(config.read_text("utf-8"))
    settings["text_config"]["max_position_embeddings"] = CONTEXT
    config.write_text(json.dumps(settings), "utf-8")
    replay = {"source": "replay:said.jsonl", "family": "qwen3", "context_length": CONTEXT}
    seeing = {"source": str(place / "sees"), "defaults": {"max_tokens": 16}}
    models = {MODEL: replay, "tags": {**replay}, SEES: seeing}
    exchanges: list[Exchange] = []
    with serving(place, {"models": models}) as server:
        with proxied(server.port, exchanges) as url:
            play(program, replace(server, url=url), home, work)
        shown = [each for each in exchanges if has_picture(each)]
        assert shown, f"no picture in {len(exchanges)} requests"
        for each in shown:
            show(server, each)


def main(client: str, *program: str) -> None:
    raise_loopback()
    error = ""
    with TemporaryDirectory() as place:
        try:
            played(client, list(program), Path(place))
        except Exception:
            error = traceback.format_exc()[-1500:]
    sys.stdout.write(json.dumps(["a picture that it reads", error]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
