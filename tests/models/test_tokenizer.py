"""Token ids to text and back."""

import json
import random
import re
from base64 import b64decode
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import sentencepiece
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Whole
from tokenizers.processors import TemplateProcessing

from mlx_server.errors import ModelUnusable
from mlx_server.models.byte_level import KIMI_PIECES, kimi_tokenizer
from mlx_server.models.sentencepiece_model import sentencepiece_tokenizer
from mlx_server.models.tokenizer import WINDOW, Tokenizer
from mlx_server.prompts.harmony.vocabulary import shipped
from mlx_server.sources.tokenizer_files import tokenizer_json
from tests.families import CONTROL, SAMPLES, byte_fallback, byte_level, write_checkpoint

KIMI = {
    "tokenizer_class": "TikTokenTokenizer",
    "added_tokens_decoder": {
        "4000": {"content": "[BOS]", "special": True},
        "4003": {"content": "<|im_end|>", "special": True},
        "4011": {"content": "<|tool_call_begin|>", "special": False},
    },
}
LETTERS = "abcXYZ ÄßéЖя中文字漢 ひカ한글\n\t\r  1234,.!?'s're\u0301🙂👩‍👩‍👧🇩🇪\u00a0\u200b٣४ǅʰª々〇"


def texts() -> list[str]:
    drawn = random.Random(1)
    written = Path(__file__).read_text("utf-8").replace("<|", "<").replace("[BOS]", "")
    lengths = [drawn.randrange(80) for _ in range(500)]
    return [written, *("".join(drawn.choices(LETTERS, k=length)) for length in lengths)]


def kimi(folder: Path, tokens: int = 4000) -> Path:
    """Kimi's own is on no registry; the first tokens of another one are a vocabulary as well."""
    folder.mkdir(exist_ok=True)
    lines = shipped().splitlines()[:tokens]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(KIMI))
    return folder


def by_ranks(text: bytes, ranks: dict[bytes, int]) -> list[int]:
    """As tiktoken does: of all neighbours, those go together first that make the lowest rank."""
    parts = [bytes([byte]) for byte in text]
    while True:
        made = [(ranks.get(a + b), at) for at, (a, b) in enumerate(pairwise(parts))]
        found = min((m for m in made if m[0] is not None), default=None)
        if found is None:
            return [ranks[part] for part in parts]
        at = found[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_kimi_s_ids_are_those_of_its_ranks(tmp_path: Path) -> None:
    folder = kimi(tmp_path / "kimi")
    made = kimi_tokenizer(folder / "tiktoken.model", KIMI)
    lines = (line.split() for line in (folder / "tiktoken.model").read_bytes().splitlines())
    ranks = {b64decode(token): int(rank) for token, rank in lines}
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(KIMI_PIECES), "isolated")
    for text in texts():
        pieces = [piece for piece, _ in split.pre_tokenize_str(text)]
        expected = [id for piece in pieces for id in by_ranks(piece.encode(), ranks)]
        assert made.encode(text, add_special_tokens=False).ids == expected
        assert made.decode(expected) == text


def test_kimi_s_special_tokens_have_their_ids_and_names(tmp_path: Path) -> None:
    made = Tokenizer(tokenizer_json(kimi(tmp_path / "kimi")))
    assert made.id_of("[BOS]") == 4000
    assert made.id_of("<|reserved_token_4001|>") == 4001
    assert made.encode("a<|im_end|>")[-1] == 4003
    assert made.id_of("<|tool_call_begin|>") == 4011
    assert made.vocabulary == 4256
    assert 4011 in made.control_tokens


@pytest.mark.parametrize(
    ("body", "config", "says"),
    [
        (b"not base64! 1\n", KIMI, "damaged"),
        (b"YQ== 0\nYg== 2\n", KIMI, "leave gaps"),
        (b"YQ==\n", KIMI, "damaged"),
        (b"YQ== 0\n", {}, "for Kimi models alone"),
    ],
)
def test_a_damaged_or_unknown_vocabulary(
    tmp_path: Path, body: bytes, config: dict[str, object], says: str
) -> None:
    (tmp_path / "tiktoken.model").write_bytes(body)
    with pytest.raises(ModelUnusable, match=says):
        kimi_tokenizer(tmp_path / "tiktoken.model", config)


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


def test_an_emoji_behind_broken_bytes_is_whole(bytewise: Tokenizer) -> None:
    lone = id_by_bytes(bytewise, b"\xa9")
    emoji = [id_by_bytes(bytewise, bytes([byte])) for byte in "🙂".encode()]
    for before in range(12):
        assert "".join(pieces(bytewise, [lone] * before + emoji)) == "�" * before + "🙂"


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


def test_a_control_token_is_spelled_as_it_is_written(tokenizer: Tokenizer) -> None:
    silent = [token for token in range(tokenizer.vocabulary) if tokenizer.is_silent(token)]
    assert silent
    for token in silent:
        assert tokenizer.encode(tokenizer.spelling(token)) == [token]


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


def test_what_a_decoder_raises_for_a_token_is_the_models_error(tmp_path: Path) -> None:
    made = Whole(models.BPE({"b": 0, "aaaa": 1}, []))
    made.decoder = decoders.Strip("a", 3, 3)
    tokenizer = saved(tmp_path, made)
    assert tokenizer.spelling(0) == "b"
    with pytest.raises(ModelUnusable, match=r"tokenizer\.json"):
        tokenizer.spelling(1)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    made = byte_level()
    made.enable_truncation(3)
    made.enable_padding(length=64)
    text = "A longer text than three tokens"
    assert saved(tmp_path, made).encode(text) == byte_level().encode(text).ids


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


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_s_own_ids(tmp_path: Path, kind: str, prefix: bool) -> None:
    files = [Path(__file__), Path(__file__).with_name("test_tokenizer.py")]
    lines = "".join(file.read_text("utf-8") for file in files)
    (tmp_path / "text.txt").write_text(lines)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=600,
        model_type=kind,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = sentencepiece_tokenizer(tmp_path / "tokenizer.model", {})
    for text in texts():
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids)


def test_a_tokenizer_model_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"YQ== 0\nYg== 1\n")
    with pytest.raises(ModelUnusable, match="Use a checkpoint with"):
        sentencepiece_tokenizer(tmp_path / "tokenizer.model", {})
