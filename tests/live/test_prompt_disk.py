"""Prompts survive the server, its engine and other models, over HTTP."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.server import LiveServer, eventually, serving, start, stop

WORDS = "the quick brown fox jumps over the lazy dog " * 20


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
        prompts = tmp_path / "data" / "prompts"
        eventually(lambda: server.gauge("mlx_server_disk_cache_bytes") > 0, "it is on the disk")
        eventually(lambda: len(list(prompts.iterdir())) > 4, "the prompt is a file")
        server.engine.kill()

        def answers() -> bool:
            try:
                return cached(server) > 0
            except (AssertionError, httpx.HTTPError):
                return False

        eventually(answers, "the engine is back", 30)
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
