"""What the engine reports of its steps and of its disk, as metrics."""

from pathlib import Path

from starlette.testclient import TestClient

from mlx_server.engine.messages import DiskCacheUse, StepOutput, Token
from tests.api import wire
from tests.api.wire import ScriptedEngine, sample


def test_metrics_know_when_the_engine_rests(tiny_path: Path) -> None:
    app = wire.app(tiny_path, ScriptedEngine())
    step = StepOutput("tiny", [Token(1, 5)], 3, 7, cache_bytes=0, buffer_bytes=5, peak_bytes=9)
    app.state.metrics.engine.on_step(step)
    with TestClient(app, base_url="http://localhost") as client:
        app.state.pool.row_slots.taken = 4
        busy = client.get("/metrics").text
        app.state.pool.row_slots.taken = 0
        idle = client.get("/metrics").text
    names = ("mlx_server_batch_size", "mlx_server_queue", "mlx_server_active_bytes")
    assert [sample(busy, name) for name in names] == [1, 3, 7]
    assert [sample(idle, name) for name in names] == [0, 0, 7]
    assert sample(idle, "mlx_server_buffer_bytes") == 5
    assert sample(idle, "mlx_server_peak_bytes") == 9


def test_metrics_count_the_prompt_caches_files(tiny_path: Path) -> None:
    app = wire.app(tiny_path, ScriptedEngine())
    for nbytes in (10, 20):
        app.state.pool.events.disk_cache(DiskCacheUse(1, 2, 300, 4000, 500, nbytes))
    with TestClient(app, base_url="http://localhost") as client:
        found = client.get("/metrics").text
    names = ("hits", "misses", "tokens", "read_bytes", "written_bytes")
    counts = [sample(found, f"mlx_server_disk_cache_{name}_total") for name in names]
    assert counts == [2, 4, 600, 8000, 1000]
    assert sample(found, "mlx_server_disk_cache_bytes") == 20
