"""Token ids to text and back."""

import re
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from mlx_server.errors import ModelUnusable
from mlx_server.models.tokenizer import WINDOW, Tokenizer
from tests.families import CONTROL, SAMPLES, byte_fallback, byte_level, write_checkpoint

TEXTS = st.lists(st.sampled_from(SAMPLES) | st.text(max_size=12), max_size=4).map("".join)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return saved(tmp_path_factory.mktemp("byte-level"), byte_level())


@pytest.fixture(scope="module")
def piecewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return saved(tmp_path_factory.mktemp("byte-fallback"), byte_fallback())


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> Tokenizer:
    return Tokenizer(demo_path / "tokenizer.json")


@pytest.fixture(scope="module", params=["bytewise", "piecewise", "demo"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found


def saved(folder: Path, made: object) -> Tokenizer:
    return Tokenizer(write_checkpoint(folder, made) / "tokenizer.json")  # type: ignore[arg-type]


def pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [detokenizer.feed(token) for token in ids]


def id_by_bytes(tokenizer: Tokenizer, wanted: bytes) -> int:
    return next(t for t in range(tokenizer.vocabulary) if tokenizer.bytes_of(t) == wanted)


def encoded_behind(before: str, text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(before + text)[len(tokenizer.encode(before)) :]


def control_ids(tokenizer: Tokenizer) -> list[int]:
    every = range(tokenizer.vocabulary)
    return [t for t in every if tokenizer.is_silent(t) and tokenizer.spelling(t) in CONTROL]


@pytest.mark.slow
@given(text=TEXTS)
def test_pieces_make_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=TEXTS)
def test_a_byte_level_round_trip_loses_nothing(bytewise: Tokenizer, text: str) -> None:
    assume(not any(bytewise.spelled(text)))
    found = pieces(bytewise, bytewise.encode(text))
    assert "".join(found) == text


def test_each_word_comes_out_with_its_own_token(demo: Tokenizer) -> None:
    ids = demo.encode("The quick brown fox")
    assert pieces(demo, ids) == ["The", " quick", " brown", " fox"]


@given(data=st.data())
def test_any_tokens_come_out_as_the_whole_would(bytewise: Tokenizer, data: st.DataObject) -> None:
    audible = [token for token in range(bytewise.vocabulary) if not bytewise.is_silent(token)]
    ids = data.draw(st.lists(st.sampled_from(audible), max_size=40))
    found, whole = "".join(pieces(bytewise, ids)), bytewise.decode(ids)
    assert whole in (found, f"{found}\ufffd")


@given(data=st.data())
def test_after_broken_utf8_the_text_goes_on(tokenizer: Tokenizer, data: st.DataObject) -> None:
    broken = data.draw(st.lists(st.integers(0, tokenizer.vocabulary - 1), max_size=40))
    detokenizer = tokenizer.detokenizer()
    for token in broken:
        detokenizer.feed(token)
    ids = tokenizer.encode("a Hello, world!")
    after = "".join(map(detokenizer.feed, ids))
    assert after.endswith("Hello, world!")


def test_what_can_not_become_a_character_is_not_waited_for(tokenizer: Tokenizer) -> None:
    first_byte = id_by_bytes(tokenizer, b"\xf0")
    detokenizer = tokenizer.detokenizer()
    out = "".join(detokenizer.feed(first_byte) for _ in range(100))
    assert len(out) >= 97
    assert set(out) == {"�"}


def test_an_emoji_behind_broken_bytes_is_whole(bytewise: Tokenizer) -> None:
    lone = id_by_bytes(bytewise, b"\xa9")
    emoji = [id_by_bytes(bytewise, bytes([byte])) for byte in "🙂".encode()]
    for before in range(12):
        assert "".join(pieces(bytewise, [lone] * before + emoji)) == "�" * before + "🙂"


def test_no_piece_of_a_character_that_was_cut_is_text(bytewise: Tokenizer) -> None:
    a, half = (id_by_bytes(bytewise, byte) for byte in (b"a", b"\xf0"))
    assert pieces(bytewise, [a, half]) == ["a", ""]
    (special,) = control_ids(bytewise)[:1]
    assert pieces(bytewise, [a, half, special, a]) == ["a", "", "", "a"]


@pytest.mark.slow
@given(text=st.sampled_from(SAMPLES), random=st.randoms(use_true_random=False))
def test_control_tokens_never_show(bytewise: Tokenizer, text: str, random: Random) -> None:
    control = control_ids(bytewise)
    characters = map(bytewise.encode, text)
    ids = [t for c in characters for t in [*random.choices(control, k=random.randrange(3)), *c]]
    assert "".join(pieces(bytewise, ids)) == text


def test_a_control_token_does_not_take_the_next_words_space(tokenizer: Tokenizer) -> None:
    hello, world = tokenizer.encode("Hello"), encoded_behind("Hello", " w", tokenizer)
    for control in range(tokenizer.vocabulary):
        if tokenizer.is_silent(control):
            assert "".join(pieces(tokenizer, [*hello, control, *world])) == "Hello w"


def test_ids_that_only_the_output_head_knows_are_no_text(tokenizer: Tokenizer) -> None:
    beyond = tokenizer.vocabulary + 5
    hello, world = tokenizer.encode("Hello"), encoded_behind("Hello", " w", tokenizer)
    assert tokenizer.spelling(beyond) == ""
    assert tokenizer.bytes_of(beyond) == b""
    assert "".join(pieces(tokenizer, [beyond, *hello, beyond, *world])) == "Hello w"


@given(text=TEXTS)
def test_bytes_of_tokens_are_the_bytes_of_the_text(bytewise: Tokenizer, text: str) -> None:
    assert b"".join(map(bytewise.bytes_of, bytewise.encode(text))) == text.encode()


@given(text=TEXTS)
def test_bytes_of_pieces_and_bytes_are_the_bytes_of_the_text(
    piecewise: Tokenizer, text: str
) -> None:
    """This kind puts a space before the text, and writes every space with the same sign."""
    found = b"".join(map(piecewise.bytes_of, piecewise.encode(text)))
    written = text.replace("▁", " ").encode()
    assert found in (written, b" " + written)


def test_a_token_is_spelled_with_its_space(tokenizer: Tokenizer) -> None:
    ids = encoded_behind("Hello", " w", tokenizer)
    assert "".join(map(tokenizer.spelling, ids)) == " w"
    assert b"".join(map(tokenizer.bytes_of, ids)) == b" w"


def test_a_control_token_is_spelled_as_it_is_written(tokenizer: Tokenizer) -> None:
    silent = [token for token in range(tokenizer.vocabulary) if tokenizer.is_silent(token)]
    assert silent
    for token in silent:
        assert tokenizer.encode(tokenizer.spelling(token)) == [token]


def test_control_finds_every_spelling(bytewise: Tokenizer) -> None:
    assert bytewise.control
    text = "".join(f"{i}{token}" for i, token in enumerate(CONTROL))
    found = [match.start() for match in bytewise.control.finditer(text)]
    assert found == [text.index(token) for token in CONTROL]


def test_control_finds_overlapping_and_nested_spellings(tmp_path: Path) -> None:
    tokens = ("<a>", "<a>b<a>", "<|x|>", "[<a>]")
    control = saved(tmp_path, byte_level(*tokens)).control
    assert control
    text = "<a>b<a>b<a> [<a>] <|<|x|>x|>"
    everywhere = {
        match.start() for token in tokens for match in re.finditer(f"(?={re.escape(token)})", text)
    }
    assert (
        {match.start() for match in control.finditer(text)} == everywhere == {0, 4, 8, 12, 13, 20}
    )


def test_added_tokens_that_look_like_markup_are_control_and_others_are_not(tmp_path: Path) -> None:
    made = byte_level("<|end|>")
    made.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "\n\n", "tea")])
    control = saved(tmp_path, made).control
    assert control
    found = [match.start() for match in control.finditer("tea\n\n<think>tea<|end|>")]
    assert found == [5, 15]


def test_a_tokenizer_without_control_tokens_has_nothing_to_find(tmp_path: Path) -> None:
    assert saved(tmp_path, byte_level(AddedToken("\n\n"))).control is None


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    made = byte_level()
    made.enable_truncation(3)
    made.enable_padding(length=64)
    text = "A longer text than three tokens"
    assert saved(tmp_path, made).encode(text) == byte_level().encode(text).ids


def test_a_damaged_file_is_the_models_fault(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelUnusable, match=r"tokenizer\.json"):
        Tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("length", [3, 3 * WINDOW])
def test_special_tokens_of_a_text_are_added_or_not(tmp_path: Path, length: int) -> None:
    made = byte_level()
    made.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    tokenizer = saved(tmp_path, made)
    text = ("ab " * length)[:length]
    plain = tokenizer.encode(text)
    assert tokenizer.encode_prompt(text, 10**9, add_special_tokens=False) == plain
    assert tokenizer.encode_prompt(text, 10**9) == [1, *plain, 2]
    assert tokenizer.with_special_tokens(plain) == [1, *plain, 2]


@pytest.mark.parametrize(("kept", "decoded_again"), [(100, False), (99, True)])
def test_the_texts_of_some_tokens_are_kept(
    demo_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, decoded_again: bool
) -> None:
    """They are needed for each alternative of each log probability, and again for its bytes."""
    decoded: list[list[str]] = []

    class Decoder:
        def decode(self, tokens: list[str]) -> str:
            decoded.append(tokens)
            return "".join(tokens)

    monkeypatch.setattr("mlx_server.models.tokenizer.SPELLINGS", kept)
    monkeypatch.setattr("mlx_server.models.tokenizer.decoder_of", lambda facts: Decoder())
    tokenizer = Tokenizer(demo_path / "tokenizer.json")
    texts, again = (
        [(tokenizer.spelling(id), tokenizer.bytes_of(id)) for id in range(300, 400)]
        for _ in range(2)
    )
    assert texts == again
    assert len(set(texts)) == 100
    assert len(decoded) == 2 * 100 * (1 + decoded_again)
