"""The tokens of a prompt that exceeds the context: exact, or the fewest that there can be."""

import asyncio
from dataclasses import replace

import pytest

from mlx_server.errors import ContextTooLong
from mlx_server.generation import plan
from mlx_server.generation.plan import PromptOverflow
from mlx_server.pool.prepare import ModelSpec, prepare
from tests.generation.scripted import ASKED, CONTEXT


def overflowing(spec: ModelSpec, *prompts: str) -> PromptOverflow:
    prepared = prepare(spec, lambda *_: None, upcast=True)
    error = ContextTooLong("too long", param="prompt")
    return PromptOverflow(error, prepared, replace(ASKED, prompts=prompts))


def test_the_longest_prompt_is_counted(spec: ModelSpec) -> None:
    found = overflowing(spec, "a" * 100, "a" * 300, "a")
    tokenizer = prepare(spec, lambda *_: None, upcast=True).checkpoint.tokenizer
    assert asyncio.run(found.tokens()) == len(tokenizer.encode("a" * 300))
    assert (found.context, found.param, found.message) == (CONTEXT, "prompt", "too long")


def test_a_text_that_is_too_long_to_count_is_estimated(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "COUNTED_CHARACTERS", 99)
    longest = prepare(spec, lambda *_: None, upcast=True).checkpoint.tokenizer.longest
    characters = 3 * CONTEXT * longest
    assert 3 * CONTEXT <= asyncio.run(overflowing(spec, "a" * characters).tokens()) < 4 * CONTEXT
    short = overflowing(spec, "a" * 100)
    assert asyncio.run(short.tokens()) == CONTEXT
