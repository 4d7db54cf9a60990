"""What a question to a grammar's matcher costs, and what is remembered between two of them."""

import numpy as np
import pytest

from mlx_server.worker.constrained_decoding.matcher_probe import CONSUMED, NARROW, Probe
from tests.worker.constrained_decoding.worlds import WIDE, World, json_of, obj

NAMED = obj(name={"enum": ["amber", "azure"]})


@pytest.fixture
def probe(demo: World) -> Probe:
    probe = Probe(demo.matcher(json_of(NAMED)), demo.pieces)
    probe.allow(1000)
    return probe


def test_tokens_fit_as_far_as_the_grammar_goes(demo: World, probe: Probe) -> None:
    right, wrong = demo.pieces.cut(b'{"name":"amber"}'), demo.pieces.cut(b'{"size":"amber"}')
    assert probe.fits(right)
    assert not probe.fits(wrong)
    assert 0 < probe.fitting(wrong) < len(wrong)


def test_nothing_fits_once_the_allowance_is_spent(demo: World, probe: Probe) -> None:
    right = demo.pieces.cut(b'{"name":')
    probe.spend(probe.left)
    assert probe.is_spent
    assert not probe.fits(right)
    probe.allow(1)
    assert probe.fits(right)
    assert probe.is_spent


def test_a_step_forward_and_back_leaves_all_as_it_was(demo: World, probe: Probe) -> None:
    opening, name = demo.pieces.cut(b'{"name":"'), demo.pieces.cut(b"azure")
    assert probe.take(opening)
    assert probe.last_byte == ord('"')
    assert probe.take(name)
    assert probe.last_byte == ord("e")
    assert not probe.begins(ord("z"))
    probe.back(len(name))
    assert probe.last_byte == ord('"')
    assert probe.excluded(b"abz") == {*b"bz"}
    assert probe.fits(name)


def test_each_token_that_is_consumed_costs(demo: World, probe: Probe) -> None:
    tokens = demo.pieces.cut(b'{"name":"')
    left = probe.left
    probe.take(tokens)
    assert left - probe.left > CONSUMED * len(tokens)


def test_a_byte_is_asked_for_once(probe: Probe) -> None:
    assert probe.begins(ord("{"))
    left = probe.left
    assert probe.begins(ord("{"))
    assert probe.left == left


def test_a_mask_answers_for_single_tokens_at_the_rows_position_only(
    demo: World, probe: Probe
) -> None:
    (brace,) = demo.pieces.cut(b"{")
    (letter,) = demo.pieces.cut(b"q")
    mask = demo.matcher(json_of(NAMED)).compute_bitmask()
    probe.see(np.frombuffer(mask, dtype=np.int32))
    left = probe.left
    assert probe.fits([brace])
    assert not probe.fits([letter])
    assert probe.left == left
    probe.take([brace])
    assert not probe.fits([brace])
    assert probe.left < left


def test_in_a_wide_object_the_end_of_a_number_costs_a_call_for_each_member(demo: World) -> None:
    width = len(WIDE["properties"])
    assert width > NARROW
    probe = Probe(demo.matcher(json_of(WIDE)), demo.pieces, width)
    probe.allow(10_000)
    comma = demo.pieces.cut(b",")[:1]
    costs = []
    for text in (b'{"m1":', b"3"):
        probe.take(demo.pieces.cut(text))
        left = probe.left
        probe.fits(comma)
        costs.append(left - probe.left)
    assert costs == [1, width]


def test_looking_ahead_at_what_is_forced_moves_nothing(demo: World, probe: Probe) -> None:
    taken = demo.pieces.cut(b'{"name":"az')
    probe.take(taken)
    assert probe.forced() == b'ure"'
    assert probe.take(demo.pieces.cut(b"ure"))
    probe.back(len(demo.pieces.cut(b"ure")) + len(taken))
    assert probe.fits(demo.pieces.cut(b'{"name":"amber"}'))


def test_an_end_is_accepted_and_no_failure(demo: World, probe: Probe) -> None:
    tokens = demo.pieces.cut(b'{"name":"azure"}')
    accepted = []
    for token in tokens:
        probe.advance(token)
        accepted.append(probe.accepts)
    assert accepted == [False] * (len(tokens) - 1) + [True]
    assert not probe.failed
