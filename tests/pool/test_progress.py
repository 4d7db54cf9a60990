"""Where there is no terminal, progress is logged at each quarter."""

import logging

import pytest

from mlx_server.pool.models import LogLineProgress


def test_a_quarter_is_logged_once_for_each_model_and_kind_of_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mlx_server.pool")
    progress = LogLineProgress()
    for done in range(0, 101, 5):
        progress("a", "loading", done, 100)
    assert caplog.messages == [f"a: loading {percent} %" for percent in (0, 25, 50, 75, 100)]
    caplog.clear()
    progress("a", "downloading", 99, 100)
    progress("b", "loading", 100, 100)
    assert caplog.messages == ["a: downloading 75 %", "b: loading 100 %"]


def test_work_without_a_size_is_done(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlx_server.pool")
    LogLineProgress()("a", "loading", 0, 0)
    assert caplog.messages == ["a: loading 100 %"]
