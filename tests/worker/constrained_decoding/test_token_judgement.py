"""Which tokens of a mask lengthen an ending too much."""

import numpy as np
import pytest

from mlx_server.worker.constrained_decoding.token_classes import Ids, Mask
from mlx_server.worker.constrained_decoding.token_judgement import (
    Judgement,
    allows,
    forbid,
    keep_only,
    one_by_one,
    sample_of,
)

SIZE = 100
"""The vocabulary: its last word of 32 bits is not full."""


def ids(*tokens: int) -> Ids:
    return np.array(tokens, dtype=np.intp)


@pytest.fixture
def mask() -> Mask:
    """A mask that allows all tokens; the sign bits count as any other."""
    return np.full((SIZE + 31) // 32, -1, dtype=np.int32)


def allowed(mask: Mask) -> set[int]:
    return {token for token in range(SIZE) if allows(mask, token)}


def test_forbidden_tokens_are_those_and_no_others(mask: Mask) -> None:
    forbid(mask, ids(0, 31, 32, 63, 99))
    assert allowed(mask) == {*range(SIZE)} - {0, 31, 32, 63, 99}
    forbid(mask, ids(31, 31))
    forbid(mask, ids())
    assert allowed(mask) == {*range(SIZE)} - {0, 31, 32, 63, 99}


def test_only_kept_tokens_are_left_if_they_were_allowed(mask: Mask) -> None:
    forbid(mask, ids(5, 64))
    keep_only(mask, [5, 31, 63, 64, 95])
    assert allowed(mask) == {31, 63, 95}


def test_what_was_not_judged_counts_as_too_long() -> None:
    judgement = Judgement([ids(1, 2)], None, 0, reads_text=False, reads_plain_text=False)
    judgement.changing.append(ids(3))
    judgement.judged += [(ids(4, 5), 0), (ids(6), 2)]
    assert {*judgement.beyond(1)} == {1, 2, 3, 6}
    assert {*judgement.beyond(2)} == {1, 2, 3}
    judgement.waiting.clear()
    judgement.changing.clear()
    assert judgement.beyond(2).size == 0


@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_a_sample_is_of_the_group(count: int) -> None:
    group = np.arange(count, dtype=np.intp)
    found = group[sample_of(group)]
    assert {found[0], found[-1]} == {0, count - 1}
    assert [one.tolist() for one in one_by_one(group)] == [[each] for each in range(count)]
