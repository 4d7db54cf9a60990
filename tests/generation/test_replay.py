"""Rows of replay models play what was recorded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_server import limits
from mlx_server.checkpoints.tokenizer import Tokenizer
from mlx_server.errors import BadRequest
from mlx_server.events import Started
from mlx_server.families.hermes import SMOLLM2
from mlx_server.messages import Conversation, Message
from mlx_server.pool.prepare import ModelSpec
from mlx_server.requests import SamplingParams
from mlx_server.sources.replay_checkpoint import replay_checkpoint
from tests.generation.scripted import (
    ASKED,
    admitted,
    answered,
    refused,
    rows_of,
    said,
    without_fingerprint,
)

Replayed = Callable[..., ModelSpec]


@pytest.fixture
def bytes_of_smollm2(tmp_path: Path) -> Tokenizer:
    return Tokenizer(replay_checkpoint(tmp_path / "own", SMOLLM2, None) / "tokenizer.json")


def test_a_replayed_row_has_its_script_and_a_stop_token(
    replayed: Replayed, bytes_of_smollm2: Tokenizer
) -> None:
    output = "<|im_start|>Hi 🙂"
    [row] = rows_of(replayed({"output": output, "delay_ms": 250}), ASKED)
    assert row.forced_tokens
    *script, stop = row.forced_tokens
    assert script == bytes_of_smollm2.encode(output)
    assert stop in row.stop_tokens
    stops = {bytes_of_smollm2.id_of(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert set(row.stop_tokens) == stops
    assert (row.delay, row.max_tokens) == (0.25, limits.ANSWER_TOKENS)


def test_a_family_without_a_stop_token_of_its_own_ends_too(replayed: Replayed) -> None:
    [row] = rows_of(replayed({"output": "Hi"}, family="plain"), ASKED)
    assert row.forced_tokens
    assert len(row.forced_tokens) == 3
    assert row.forced_tokens[-1:] == row.stop_tokens


@pytest.mark.parametrize(("asked", "granted"), [(None, 5), (100, 5), (5, 5), (3, 3)])
def test_an_output_that_was_cut_is_cut_there(
    replayed: Replayed, asked: int | None, granted: int
) -> None:
    entry = {"output": "Hello", "finish": "length"}
    [row] = rows_of(replayed(entry), replace(ASKED, max_tokens=asked))
    assert row.max_tokens == granted


def test_an_output_of_token_ids_is_played_as_it_is(replayed: Replayed) -> None:
    [row] = rows_of(replayed({"output_token_ids": [7, 258, 7]}), ASKED)
    assert row.forced_tokens == [7, 258, 7, row.stop_tokens[0]]


def test_an_empty_output_is_an_end(replayed: Replayed) -> None:
    [row] = rows_of(replayed({"output": ""}), ASKED)
    assert row.forced_tokens == row.stop_tokens[:1]
    assert row.max_tokens > 0


def test_the_generation_prompt_is_a_part_of_the_prompt(
    replayed: Replayed, bytes_of_smollm2: Tokenizer
) -> None:
    spec = replayed({"output": "x", "generation_prompt": "<|im_start|>ab"}, {"output": "y"})
    request = replace(ASKED, n=2)
    own = bytes_of_smollm2.encode("Hello")
    longer = [*own, *bytes_of_smollm2.encode("<|im_start|>ab")]
    assert [row.prompt for row in rows_of(spec, request)] == [longer, own]
    events, _ = answered(
        spec, request, [*admitted(0, 1), *said([256], 0, "stop"), *said([256], 1, "stop")]
    )
    started = Started("m", len(longer), sampling=SamplingParams(temperature=0.0))
    assert without_fingerprint(events[0]) == started, "as it would be of a real model"


def test_n_answers_and_several_prompts_take_the_next_entries(
    replayed: Replayed, bytes_of_smollm2: Tokenizer
) -> None:
    spec = replayed(*({"output": word} for word in "abc"), {"match": "two", "output": "z"})
    rows = rows_of(spec, replace(ASKED, prompts=("one", "two", "three"), n=2))
    said = [bytes_of_smollm2.decode(row.forced_tokens or []) for row in rows]
    assert said == ["a", "b", "z", "z", "c", "a"]


def test_a_conversation_is_matched_by_its_last_user_text(
    replayed: Replayed, bytes_of_smollm2: Tokenizer
) -> None:
    spec = replayed({"match": "regex:^B", "output": "yes"})
    messages = (Message("user", "A"), Message("assistant", "?"), Message("user", "B"))
    [row] = rows_of(spec, replace(ASKED, prompts=(Conversation(messages),)))
    assert bytes_of_smollm2.decode(row.forced_tokens or []) == "yes"
    error = refused(spec, replace(ASKED, prompts=(Conversation(messages[:1]),)))
    assert isinstance(error, BadRequest)
    assert error.param == "messages"


def test_a_real_model_has_no_script(spec: ModelSpec) -> None:
    [row] = rows_of(spec, ASKED)
    assert (row.forced_tokens, row.delay) == (None, 0.0)
