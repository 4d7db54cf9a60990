"""`/v1/pool` shows how much of each prompt under way is computed, by a real engine."""

from pathlib import Path

import httpx

from mlx_server.config.settings import Settings, validated
from mlx_server.engine.messages import PrefillProgress
from mlx_server.pool.models import PrefillView
from tests.hostile.inside import Inside, serving
from tests.live.server import PLAIN

PROMPT = "a " * 700


def test_prompts_under_way_are_shown(tiny_path: Path) -> None:
    settings = validated(
        Settings,
        {"server": {"port": 0}, "models": {"tiny": {"source": str(tiny_path), "preload": True}}},
    )
    with serving(settings) as server:
        seen = watched(server)
        with httpx.Client(**PLAIN, base_url=f"http://127.0.0.1:{server.port}") as http:
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3}
            answer = http.post("/v1/completions", json=body, timeout=60).json()
            shown = http.get("/v1/pool").json()["models"][0]["prefilling"]
    prompt = answer["usage"]["prompt_tokens"]
    assert len(seen) > 1
    assert {view.prompt_tokens for view in seen} == {prompt}
    computed = [view.computed_tokens for view in seen]
    assert computed == sorted(set(computed))
    assert computed[-1] == prompt - 1, "the last token is computed with the first of the answer"
    assert shown == []


def watched(server: Inside) -> list[PrefillView]:
    """What the pool shows after each piece."""
    seen: list[PrefillView] = []

    def watch() -> None:
        engine = server.pool.engines[0].engine
        before = engine.on_prefill

        def on_prefill(progress: PrefillProgress) -> None:
            before(progress)
            (view,) = server.pool.views()
            seen.extend(view.prefilling)

        engine.on_prefill = on_prefill

    server.within(watch)
    return seen
