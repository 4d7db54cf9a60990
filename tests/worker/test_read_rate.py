"""Weights are read by time, on any disk."""

import pytest

from mlx_server.worker import weights
from mlx_server.worker.weights import ALONE_SECONDS, DECODING_SECONDS, WeightReadPace

GB = 10**9


def seconds_of_pieces(pace: WeightReadPace, rate: float, pieces: int) -> list[float]:
    taken = []
    for _ in range(pieces):
        nbytes = pace.nbytes
        taken.append(nbytes / rate)
        pace.learn(nbytes, taken[-1])
    return taken


@pytest.mark.parametrize("rate", [0.2 * GB, 1 * GB, 3 * GB, 8 * GB])
def test_pieces_take_their_time_whatever_the_disk(rate: float) -> None:
    pace = WeightReadPace()
    pace.while_decoding = True
    *_, last = seconds_of_pieces(pace, rate, 10)
    assert last == pytest.approx(max(DECODING_SECONDS, weights.LEAST_BYTES / rate), rel=0.01)
    pace.while_decoding = False
    *_, last = seconds_of_pieces(pace, rate, 10)
    assert last == pytest.approx(ALONE_SECONDS, rel=0.01)
    pace.while_decoding = True  # a row has come: at once
    assert pace.nbytes / rate == pytest.approx(max(DECODING_SECONDS, weights.LEAST_BYTES / rate))


def test_beside_rows_the_disk_is_used_for_most_of_what_it_can() -> None:
    """Of a step of 20 ms that another model takes, not 8 MB: 0.4 GB a second."""
    pace = WeightReadPace()
    pace.while_decoding = True
    seconds_of_pieces(pace, 6 * GB, 10)
    assert pace.nbytes / (DECODING_SECONDS + 0.020) > 1.5 * GB


def test_a_piece_from_the_page_cache_does_not_make_the_next_one_endless() -> None:
    pace = WeightReadPace()
    pace.learn(8 << 20, 1e-9)
    assert pace.nbytes <= 4 * (8 << 20)


def test_a_disk_that_becomes_slow_is_noticed_within_some_pieces() -> None:
    pace = WeightReadPace()
    pace.while_decoding = True
    seconds_of_pieces(pace, 6 * GB, 10)
    taken = seconds_of_pieces(pace, 0.3 * GB, 8)
    assert taken[-1] < 2 * DECODING_SECONDS
