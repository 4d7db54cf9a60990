"""A short run of `scripts/chaos`."""

from pathlib import Path

import pytest

from tests.live.chaos import raged


@pytest.mark.slow
def test_no_stream_is_lost_and_none_has_another_byte(tmp_path: Path) -> None:
    chaos = raged(tmp_path, kills=3, clients=6, tokens=24, seed=2, restarting=0.4, models=["llama"])
    assert chaos.answers > 6
    assert 0 < chaos.restarts < chaos.kills
    assert not chaos.wrong, chaos.wrong[0]
