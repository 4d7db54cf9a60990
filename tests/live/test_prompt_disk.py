"""Prompts survive the server, its engine and other models, over HTTP."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.server import LiveServer, serving, start, stop

WORDS = "the quick brown fox jumps over the lazy dog " * 20


def wait_for(true: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.05)


def cached(server: LiveServer, prompt: str = WORDS, key: str = "none", **body: Any) -> int:
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, **body}
    with server.http() as http:
        answer = http.post(
            "/v1/completions", json=asked, headers={"Authorization": f"Bearer {key}"}
        )
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"])


@pytest.fixture
def config(tiny_path: Path) -> dict[str, Any]:
    return {"models": {"tiny": {"source": str(tiny_path)}}}


def test_a_restart_of_the_server(tmp_path: Path, config: dict[str, Any]) -> None:
    server = start(tmp_path, config)
    assert cached(server) == 0
    stop(server)
    with serving(tmp_path, config) as server:
        assert cached(server, WORDS + "again") > 800
        assert server.gauge("mlx_server_disk_cache_hits_total") == 1
        assert server.gauge("mlx_server_disk_cache_read_bytes_total") > 0
        assert server.gauge("mlx_server_disk_cache_bytes") > 0
        folder = tmp_path / "data" / "prompts"
        assert sum(e.stat().st_blocks * 512 for e in folder.iterdir() if e.name != "lock") > 0


def test_the_death_of_the_engine(tmp_path: Path, config: dict[str, Any]) -> None:
    with serving(tmp_path, config) as server:
        assert cached(server) == 0
        wait_for(lambda: server.gauge("mlx_server_disk_cache_written_bytes_total") > 0)
        wait_for(lambda: server.gauge("mlx_server_disk_cache_bytes") > 0)
        wait_for(lambda: len(list((tmp_path / "data" / "prompts").iterdir())) > 4)
        server.engine.kill()

        def answers() -> bool:
            try:
                return cached(server) > 0
            except (AssertionError, httpx.HTTPError):
                return False

        wait_for(answers)
        assert server.gauge("mlx_server_disk_cache_hits_total") >= 1


def test_what_is_not_to_be_stored_and_other_keys(tmp_path: Path, config: dict[str, Any]) -> None:
    config = {**config, "server": {"api_keys": ["one", "other"]}}
    first = start(tmp_path, config)
    assert cached(first, key="one") == 0
    assert cached(first, "secret " * 100, "one", store=False) == 0
    stop(first)
    with serving(tmp_path, config) as server:
        assert cached(server, key="other") == 0
        assert cached(server, "secret " * 100, "one", store=False) == 0
        assert cached(server, key="one") > 800
