"""What one answer takes of the server's memory and time is bounded, and what all take."""

import pytest

from mlx_server import limits
from mlx_server.errors import UpstreamFailed
from mlx_server.upstream.responses import MEMORY_PER_BYTE, Allowance


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UPSTREAM_MEMORY", 100 * MEMORY_PER_BYTE)
    monkeypatch.setattr(limits, "UPSTREAM_ALL_MEMORY", 150 * MEMORY_PER_BYTE)


def test_an_answer_has_so_much_and_no_more() -> None:
    one = Allowance(60)
    one.charge(100)
    with pytest.raises(UpstreamFailed, match="too many bytes"):
        one.charge(1)
    one.release()


def test_of_all_answers_only_the_large_ones_fail() -> None:
    large, small = Allowance(60), Allowance(60)
    Allowance(60).charge(0)  # an answer of which nothing has come is none that runs
    large.charge(90)
    small.charge(60)
    with pytest.raises(UpstreamFailed, match="together"):
        large.charge(1)
    small.charge(5)
    large.release()
    small.charge(35)
    for each in (small, large):  # a second release changes nothing
        each.release()
        each.release()
    alone = Allowance(60)
    alone.charge(100)
    alone.release()
