"""What is drafted: from earlier tokens, from JSON's text, from grammars and from predictions."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from bench_parts.speculation.corpora import by_schema, copies, tool_calls
from bench_parts.speculation.simulated import Drafters, Tokenize
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from mlx_server.engine.messages import FIRST_MEDIA_ID as PICTURE
from mlx_server.grammars.grammar import text_of
from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary
from mlx_server.worker.costs import FLAT
from mlx_server.worker.engine import Engine
from mlx_server.worker.speculation import text_lookup
from mlx_server.worker.speculation.approximate_tokenizer import ApproximateTokenizer
from mlx_server.worker.speculation.draft import Draft, Drafter
from mlx_server.worker.speculation.gate import Gate
from mlx_server.worker.speculation.lookup import BLOCK, TokenLookup
from mlx_server.worker.speculation.text_lookup import TextLookup
from tests.worker.engine_runs import ask, failures

CODE = Path(__file__).read_text("utf-8")


def tokens_of(draft: Draft | None) -> list[int]:
    return draft.tokens if draft else []


def tokens_per_pass(drafter: Drafter, answer: Sequence[int], most: int) -> float:
    """With all drafts sent, of so many tokens at most."""
    drafter.extend(answer[:1])
    at, passes = 1, 0
    while at < len(answer):
        drafted, right = tokens_of(drafter.draft(most)), 0
        while right < len(drafted) and [drafted[right]] == [*answer[at + right : at + right + 1]]:
            right += 1
        drafter.extend(answer[at : at + right + 1])
        at, passes = at + right + 1, passes + 1
    return (len(answer) - 1) / passes


@pytest.mark.parametrize(
    ("prompt", "answer", "draft"),
    [
        ([1, 2, 3, 4, 5], [1, 2], [3, 4, 5]),
        ([1, 2, 3, 9, 2, 3, 4, 7, 1, 2, 3], [], [9, 2, 3]),  # the longest match, not the newest
        ([1, 2, 3, 1, 2, 4, 8], [1, 2], [4, 8, 1]),  # the newest of equal ones
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 30, 5], [6, 7, 1]),  # a token was replaced
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 30, 3, 4], [5, 6, 7]),  # and one was added
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 5, 6], [7, 8, 1]),  # and others left out
        ([1, 2, 3], [7], []),
        ([1, 2, PICTURE, PICTURE | 9], [1, 2], [PICTURE, PICTURE | 9, 1]),
        ([1, 2, PICTURE, PICTURE | 9], [], []),
        ([], [1], []),
    ],
)
def test_what_followed_the_last_tokens_is_drafted(
    prompt: list[int], answer: list[int], draft: list[int]
) -> None:
    lookup = TokenLookup(prompt)
    for token in answer:
        lookup.draft(3)
        lookup.extend([token])
    assert tokens_of(lookup.draft(3))[:3] == draft
    assert tokens_of(lookup.draft(3))[:3] == draft  # asking changes nothing


def test_a_place_is_found_in_every_block_of_a_long_prompt() -> None:
    prompt = Random(1).choices(range(40_000), k=3 * BLOCK)
    for place in (7, BLOCK - 2, BLOCK, 3 * BLOCK - 9):
        lookup = TokenLookup(prompt)
        lookup.extend(prompt[place : place + 4])
        drafts = [tokens_of(lookup.draft(2)) for _ in range(3)]  # a block is read with each
        assert drafts[-1] == prompt[place + 4 : place + 6]


def test_a_copy_with_edits_takes_a_sixth_of_the_passes(tokenize: Tokenize) -> None:
    for sample in copies(count=4):
        lookup = TokenLookup(tokenize(sample.prompt))
        assert tokens_per_pass(lookup, tokenize(sample.answer), 31) >= 6


def test_a_prediction_is_drafted_from_its_beginning_and_found_again_after_a_departure() -> None:
    predicted = [*range(100, 160)]
    prediction = TokenLookup([1, 2, 3], predicted)
    assert tokens_of(prediction.draft(4)) == [100, 101, 102, 103]
    prediction.extend([100, 101, 7, 8, 9, 7, 8, 9, 130, 131])
    assert tokens_of(prediction.draft(2)) == [132, 133]
    prediction.extend(predicted[32:])
    assert prediction.draft(4) is None


@pytest.mark.parametrize("predicted", [[5] * 250_000, [5], [*range(250_000)]])
def test_any_prediction_may_be_wrong(predicted: list[int]) -> None:
    prediction = TokenLookup([], predicted)
    rng = Random(2)
    for _ in range(50):
        assert len(tokens_of(prediction.draft(31))) <= 31
        prediction.extend(rng.choices(range(9), k=3))


def test_code_in_a_json_string_is_found_in_a_file_with_line_numbers(
    vocabulary: Vocabulary, tokenize: Tokenize
) -> None:
    lines = CODE.splitlines()[60:110]
    numbered = "".join(f"{n:6d}\t{line}\n" for n, line in enumerate(lines, 1))
    call = json.dumps({"name": "edit", "arguments": {"old_string": "\n".join(lines[10:30])}})
    classes = vocabulary.token_classes
    tokenizer = ApproximateTokenizer(classes.ids)
    prompt, answer = tokenize(numbered), tokenize(call)
    text = tokens_per_pass(TextLookup(prompt, classes.text_of, tokenizer), answer, 15)
    assert text > 1.5 * tokens_per_pass(TokenLookup(prompt), answer, 15)
    closed = TextLookup(prompt, classes.text_of, tokenizer)
    closed.extend(answer)
    assert closed.draft(15) is None  # what comes after the string is no text of the file


@pytest.mark.parametrize("header", ["@@ -1,50 +1,52 @@", "*** Update File: a.py"])
def test_lines_of_a_diff_are_found_without_their_marks(
    vocabulary: Vocabulary, tokenize: Tokenize, header: str
) -> None:
    lines = CODE.splitlines()[60:110]
    new = ["+    added = 1", "+    lines = 2"]
    gone = [f"-{line}" for line in lines[12:18]]
    diff = [header, *(f" {line}" for line in lines[:12]), *gone, *new]
    answer = tokenize("\n".join([*diff, *(f" {line}" for line in lines[18:40])]))
    classes, prompt = vocabulary.token_classes, tokenize("\n".join(lines))
    lookup = TextLookup(prompt, classes.text_of, ApproximateTokenizer(classes.ids))
    text = tokens_per_pass(lookup, answer, 15)
    assert text > 1.5 * tokens_per_pass(TokenLookup(prompt), answer, 15)
    lookup.extend(tokenize("\n+    more = "))
    assert lookup.draft(15) is None  # a new line is not in the file


def test_a_long_prompts_text_is_read_in_pieces(
    vocabulary: Vocabulary, tokenize: Tokenize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_lookup, "PIECE", 64)
    classes = vocabulary.token_classes
    prompt, read = tokenize("\n".join(CODE.splitlines()[60:110])), list[int]()

    def text_of(token: int) -> bytes:
        read.append(token)
        return classes.text_of(token)

    lookup = TextLookup(prompt, text_of, ApproximateTokenizer(classes.ids))
    for token in tokenize(json.dumps({"old_string": "\n".join(CODE.splitlines()[70:72])})[:-2]):
        lookup.extend([token])
    drafts = []
    for _ in range(0, len(prompt), 64):
        before = len(read)
        drafts.append(lookup.draft(15))
        assert len(read) - before <= 64
    *early, last = drafts
    assert len(early) > 3
    assert not any(early)
    assert last


@pytest.mark.parametrize("text", [CODE, json.dumps(CODE), "Ein Text, 12345 Äpfel\n\n  und  mehr."])
def test_text_is_cut_nearly_as_the_tokenizer_does(
    vocabulary: Vocabulary, tokenize: Tokenize, text: str
) -> None:
    def ends(tokens: list[int]) -> set[tuple[int, int]]:
        at, found = 0, set[tuple[int, int]]()
        for token in tokens:
            at += len(vocabulary.text[token])
            found.add((at, token))
        return found

    tokenizer = ApproximateTokenizer(vocabulary.token_classes.ids)
    exact, cut = tokenize(text), tokenizer.tokens(text.encode(), len(text))
    assert len(ends(exact) & ends(cut)) >= 0.98 * len(exact)


@given(st.binary(max_size=200), st.integers(0, 40))
def test_any_bytes_are_cut(vocabulary: Vocabulary, text: bytes, most: int) -> None:
    tokenizer = ApproximateTokenizer(vocabulary.token_classes.ids)
    tokens = tokenizer.tokens(text, most)
    assert len(tokens) <= most
    joined = b"".join(vocabulary.text[token] for token in tokens)
    assert text.decode("utf-8", "ignore").encode().startswith(joined)


def test_what_a_schema_forces_is_drafted_and_nothing_that_it_forbids(drafters: Drafters) -> None:
    rates = []
    for sample in [*by_schema()[::2], *tool_calls()[::2]]:
        assert sample.schema
        answer = drafters.tokenize(sample.answer)
        drafter = drafters.of(sample, Gate(FLAT))
        matcher = LLMatcher(drafters.trie, f"start: %json {text_of(sample.schema)}")
        for at, token in enumerate(answer):
            drafted = tokens_of(drafter.draft(15))
            assert matcher.validate_tokens(drafted) == len(drafted), answer[:at]
            assert matcher.consume_token(token)
            drafter.extend([token])
        rates.append(tokens_per_pass(drafters.of(sample, Gate(FLAT)), answer, 15))
    assert sum(rates) / len(rates) >= 1.75


def test_without_a_matcher_the_other_drafts_stay(drafters: Drafters) -> None:
    """As in reasoning without a grammar, or where the matcher is slow."""
    (sample, *_) = by_schema()
    drafter = drafters.of(sample, Gate(FLAT), matcher=lambda answer: None)
    drafter.extend(drafters.tokenize(sample.prompt)[:20])
    assert tokens_of(drafter.draft(4)) == drafters.tokenize(sample.prompt)[20:24]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 5), max_size=60), st.lists(st.integers(0, 5), max_size=60))
def test_any_row_is_drafted_for(drafters: Drafters, prompt: list[int], answer: list[int]) -> None:
    drafter = drafters.of_row(prompt, Gate(FLAT), prediction=prompt[::-1])
    for token in answer:
        draft = drafter.draft(7)
        assert draft is None or len(draft.chances) <= len(draft.tokens) <= 7
        drafter.extend([token])


@pytest.mark.parametrize("token", [320, -1, 2**40])
def test_a_prediction_outside_the_vocabulary_is_refused(engine: Engine, token: int) -> None:
    """MLX would read other memory."""
    assert "token id" in failures(engine.handle(ask(1, prediction=[5, token])))[1]
