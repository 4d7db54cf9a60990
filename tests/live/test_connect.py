"""`mlx-server connect` next to a live server, in a home folder of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.server import DEMO, TINY, LiveServer, serving


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, demo_path: Path, tiny_path: Path
) -> Iterator[LiveServer]:
    """With few models, as all of them are listed."""
    models = {DEMO: {"source": str(demo_path)}, TINY: {"source": str(tiny_path)}}
    with serving(tmp_path_factory.mktemp("connect"), {"models": models}) as server:
        yield server


def connect(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HOME": str(home), "PATH": f"{home}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "mlx_server", "connect", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_the_server_says_its_model_and_context(tmp_path: Path, server: LiveServer) -> None:
    done = connect(tmp_path, "pi", "--url", f"{server.url}/v1", "--write", "--model", TINY)
    assert done.returncode == 0, done.stderr
    path = tmp_path / ".pi" / "agent" / "models.json"
    (provider,) = json.loads(path.read_text())["providers"].values()
    assert provider["baseUrl"] == f"{server.url}/v1"
    (model,) = provider["models"]
    assert (model["id"], model["contextWindow"]) == (TINY, 2048)


def test_the_first_model_is_the_default(tmp_path: Path, server: LiveServer) -> None:
    done = connect(tmp_path, "codex", "--url", server.url)
    assert f'model = "{DEMO}"' in done.stdout
    assert list(tmp_path.iterdir()) == [], "without --write nothing is written"


def test_a_client_is_started(tmp_path: Path, server: LiveServer) -> None:
    program = tmp_path / "claude"
    program.write_text('#!/bin/sh\necho "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL"\n')
    program.chmod(0o755)
    done = connect(tmp_path, "claude", "--url", server.url, "--run")
    assert done.stdout == f"{server.url} {DEMO}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("codx",), "The nearest: codex"),
        (("codex", "--model", "none-such"), "not served here"),
        (("codex", "--context-length", "0"), "--context-length"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, server: LiveServer, arguments: tuple[str, ...], said: str
) -> None:
    done = connect(tmp_path, *arguments, "--url", server.url)
    assert done.returncode == 2
    assert said in done.stderr


def test_without_a_server_that_is_said(tmp_path: Path) -> None:
    done = connect(tmp_path, "codex", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "mlx-server serve" in done.stderr
