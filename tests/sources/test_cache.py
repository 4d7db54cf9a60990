"""The folder of what is fetched and made."""

from pathlib import Path

import pytest

from mlx_server.sources.cache import cache_dir

pytestmark = pytest.mark.slow


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("MLX_SERVER_CACHE", raising=False)
    assert cache_dir() == Path("/home/me/.cache/mlx-server")
    monkeypatch.setenv("MLX_SERVER_CACHE", "~/elsewhere")
    assert cache_dir() == Path("/home/me/elsewhere")
