"""MCP servers on a real server: how they are configured, and that they go with it."""

import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.live.common import HOSTILE, QUIET, Models, common_models, transcript
from tests.live.server import STOP_SECONDS, LiveServer, assert_gone, eventually, serving

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
MODEL = "connects"
END = "<|endoftext|>"
"""The stop token that a replay model of this family writes."""


@common_models
def models(folder: Path, _: object) -> Models:
    transcript(folder / "said.jsonl", [{"output": CALL}, {"output": "I have seen it."}])
    return {MODEL: {"source": "replay:said.jsonl", "family": "qwen3"}}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setenv("MLX_SERVER_DATA", str(tmp_path / "data"))
    config = {
        "models": models(tmp_path, {}),
        "connectors": {"hangs": {"command": sys.executable, "args": [HOSTILE, "hangs"]}},
    }
    with serving(tmp_path, config) as server:
        yield server
        assert "Traceback" not in server.log


def asked(connector: str) -> dict[str, Any]:
    tool = {"type": "mcp", "server_label": "eye", "connector_id": connector}
    return {"model": MODEL, "input": "Look!", "tools": [{**tool, "require_approval": "never"}]}


def running(server: LiveServer, habit: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if habit in process.cmdline():
                found.append(process)
    return found


def test_a_connector_is_called_and_is_gone_with_the_response(server: LiveServer) -> None:
    with server.http() as http:
        body = http.post("/v1/responses", json={**asked(QUIET), "include_raw": True}).json()
    assert body["status"] == "completed", body
    listed, called, message = body["output"]
    assert [tool["name"] for tool in listed["tools"]] == ["look"]
    assert (called["type"], called["output"], called["error"]) == ("mcp_call", "seen", None)
    assert message["content"][0]["text"] == "I have seen it."
    assert body["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert body["usage"]["output_tokens_details"]["tool_output_tokens"] == len("seen")
    assert server.counted("mlx_server_tool_output_tokens_total", MODEL) == len("seen")
    assert server.counted("mlx_server_mcp_calls_total", MODEL, outcome="completed") == 1
    raw = [each["text"].removesuffix(END) for each in body["mlx_server"]["raw"]]
    assert raw == [CALL, "I have seen it."]
    eventually(lambda: not running(server, QUIET), "the connector is gone")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_connectors_go_with_the_server(own: LiveServer, number: signal.Signals) -> None:
    with (
        own.http() as http,
        http.stream("POST", "/v1/responses", json={**asked("hangs"), "stream": True}) as lines,
    ):
        assert any("mcp_call.in_progress" in line for line in lines.iter_lines())
        started = running(own, "hangs")
        assert started
        own.process.send_signal(number)
    own.process.wait(STOP_SECONDS)
    assert_gone(started)
