"""`mlx-server connect` next to a live server, in a home folder of its own."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.fork_server import ran
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
    return ran("connect", *arguments, HOME=str(home), PATH=f"{home}:{os.environ['PATH']}")


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
    ("arguments", "code", "words"),
    [
        (("--model", "none-such"), 2, "not served here"),
        (("--context-length", "0"), 2, "--context-length"),
        (("--url", "http://127.0.0.1:9"), 1, "mlx-server serve"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, server: LiveServer, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = connect(tmp_path, "codex", "--url", server.url, *arguments)
    assert (done.returncode, words in done.stderr) == (code, True)
