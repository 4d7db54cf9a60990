"""A vocabulary's tokens by their effect on an ending."""

import numpy as np
import pytest

from mlx_server.worker.constrained_decoding.vocabulary import TokenClasses

TEXTS = [b"a", b"b", b"ab", b"abc", b'"', b'",', b"{", b" a", b"\xc3", b"\\", b"<call>", b"<end>"]
CLASSES = TokenClasses(TEXTS, [11], [10, 11])


def mask_of(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([sum(1 << id for id in ids)], dtype=np.int32)


@pytest.mark.parametrize(
    ("text", "tokens"), [(b"abcab", [3, 2]), (b'a",', [0, 5]), (b"xa", []), (b"<call>", [])]
)
def test_a_text_is_cut_longest_first_and_never_into_control_tokens(
    text: bytes, tokens: list[int]
) -> None:
    assert CLASSES.cut(text) == tokens


def test_tokens_of_the_same_characters_are_one_group() -> None:
    groups = {tuple(sorted(ids.tolist())) for ids in CLASSES.by_kind.of(mask_of(*range(12)))}
    assert {(0, 1, 2, 3), (4,), (5,), (6,), (10,)} <= groups
    assert not any(11 in group for group in groups), "a stop token is in no group"


def test_plain_tokens_stay_inside_a_text() -> None:
    plain = [id for id in range(12) if int(CLASSES.plain[0]) >> id & 1]
    assert plain == [0, 1, 2, 3, 6, 7]


def test_the_allowed_tokens_of_a_mask_are_without_stop_tokens() -> None:
    assert CLASSES.allowed(mask_of(0, 3, 11)).tolist() == [0, 3]


def test_control_tokens_have_no_bytes() -> None:
    assert (CLASSES.text_of(10), CLASSES.text_of(3)) == (b"", b"abc")
    assert CLASSES.ink[7] == 1, "without the blank before it"


def test_tokens_that_lead_to_a_text() -> None:
    texts = [b'"', b'a"', b'",', b'b.",', b'\\"', b"'\"", b"a", b"b", b"<end>"]
    classes = TokenClasses(texts, [8], [8])
    assert dict(classes.beginnings(b'","x')) == {1: [0, 1, 5], 2: [2, 3]}, "no escaped quote"
    assert dict(classes.beginnings(b"ab")) == {1: [6]}
