"""Ranks whose tokens differ are found."""

from mlx_server.worker.ranks.tape import CHECK_STEPS, Comparison, TokenDigest
from tests.worker.ranks.steps import a_step


def test_digests_differ_where_a_token_does() -> None:
    steps = [a_step(i) for i in range(CHECK_STEPS)]
    same, other, longer = TokenDigest(), TokenDigest(), TokenDigest()
    due = [same.add([step]) for step in steps]
    assert due == [False] * (CHECK_STEPS - 1) + [True]
    steps[3].tokens[0].id += 1
    for step in steps:
        other.add([step])
        longer.add([a_step(0, tokens=0), step])
    assert same.value != other.value == longer.value
    assert longer.steps == same.steps, "a step without tokens is none"


def test_the_rank_that_differs_is_named_whichever_report_comes_first() -> None:
    digest = TokenDigest()
    digest.steps, digest.value = 16, 5
    early, late = Comparison(2), Comparison(2)
    assert early.reported(1, 16, 5) is None
    assert early.reported(2, 16, 6) is None
    assert early.own(digest) == 2
    assert late.own(digest) is None
    assert late.reported(2, 16, 5) is None
    assert late.reported(1, 16, 9) == 1
    assert not late._own, "nothing is kept of what has been compared"
