"""`mlx-server connect` next to a live server, in a home folder of its own."""

import json
import os
import subprocess
from pathlib import Path

from tests.live.fork_server import ran
from tests.live.server import TINY, LiveServer


def connect(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return ran("connect", *arguments, HOME=str(home), PATH=f"{home}:{os.environ['PATH']}")


def test_the_server_says_its_model_and_context(tmp_path: Path, server: LiveServer) -> None:
    done = connect(tmp_path, "pi", "--url", f"{server.url}/v1", "--write", "--model", TINY)
    assert done.returncode == 0, done.stderr
    path = tmp_path / ".pi" / "agent" / "models.json"
    (provider,) = json.loads(path.read_text())["providers"].values()
    assert provider["baseUrl"] == f"{server.url}/v1"
    (model,) = provider["models"]
    assert (model["id"], model["contextWindow"]) == (TINY, 2048)


def test_a_client_is_started(tmp_path: Path, server: LiveServer) -> None:
    program = tmp_path / "claude"
    program.write_text('#!/bin/sh\necho "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL"\n')
    program.chmod(0o755)
    done = connect(tmp_path, "claude", "--url", server.url, "--model", TINY, "--run")
    assert done.stdout == f"{server.url} {TINY}\n"
