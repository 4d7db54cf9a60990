"""Recorded tokens next to what a grammar allows: an error where they differ, one way to an end."""

import numpy as np
import pytest

from mlx_server.engine.messages import Generate
from mlx_server.requests import SamplingParams
from mlx_server.worker.constrained_decoding.logit_constraints import (
    BEFORE,
    SHOWN,
    LeftGrammar,
    RecordedTokens,
    recorded_tokens_of,
)
from mlx_server.worker.constrained_decoding.vocabulary import Bitmask

TEXTS = [b"long", b"a", b"bc", *[b"xyz"] * 61]
STOP = 63


def allowing(*tokens: int) -> Bitmask:
    mask = np.zeros(2, np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


def ids(mask: Bitmask) -> list[int]:
    return [token for token in range(64) if mask[token // 32] >> np.uint32(token % 32) & 1]


def test_a_token_that_is_allowed_is_played() -> None:
    recorded = RecordedTokens([33, 2, STOP])
    recorded.check(allowing(33, 1), TEXTS)
    recorded.played = 1
    recorded.check(allowing(2), TEXTS)


def test_another_one_is_reported_with_the_shortest_that_are_allowed() -> None:
    recorded = RecordedTokens([5] * 100 + [33, STOP])
    recorded.played = 100
    with pytest.raises(LeftGrammar) as caught:
        recorded.check(allowing(0, 1, 2, *range(40, 60)), TEXTS)
    left = caught.value
    assert (left.at, left.token, left.before) == (100, 33, [5] * BEFORE)
    assert left.allowed[:2] == [1, 2]
    assert (len(left.allowed), left.others) == (SHOWN, 23 - SHOWN)


def test_at_its_limit_a_row_takes_the_way_to_the_end() -> None:
    recorded = RecordedTokens([33, 2, STOP])
    allowed = allowing(33, 1, 40)
    recorded.close(allowed, [40, 1], [STOP])
    assert ids(allowed) == [1, 33, 40]  # the recorded one fits
    allowed = allowing(1, 40)
    recorded.close(allowed, [40, 1], [STOP])
    assert ids(allowed) == [40]
    recorded.played = 1
    recorded.check(allowing(1), TEXTS)  # the recording does not matter any more
    allowed = allowing(2, STOP)
    recorded.close(allowed, [], [STOP])
    assert ids(allowed) == [STOP]
    allowed = allowing(1, 2)
    recorded.close(allowed, None, [STOP])  # no end is known
    assert ids(allowed) == [1, 2]


def test_only_rows_with_a_named_recording_are_checked() -> None:
    row = Generate(0, "m", [1], 10, [STOP], SamplingParams())
    assert recorded_tokens_of(row) is None
    row.forced_tokens = [1, STOP]
    assert recorded_tokens_of(row) is None
    row.recording = "entry 1"
    found = recorded_tokens_of(row)
    assert found
    assert not found.is_cut
