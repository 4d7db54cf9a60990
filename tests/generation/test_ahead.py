"""Which answers have the beginning of their conversation's next prompt computed."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from mlx_server.checkpoints.tokenizer import Tokenizer
from mlx_server.engine.messages import ComputeAhead
from mlx_server.generation.generate import generate
from mlx_server.messages import Conversation, Message
from mlx_server.pool.engine_models import PoolLimits
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec
from mlx_server.requests import GenerateRequest
from tests.generation.scripted import END, Batch, Engine, admitted, run, said

CHAT = GenerateRequest("m", (Conversation((Message("user", "a"),)),), cache_scope="k")


class Hearing(Engine):
    """Keeps what it is to compute ahead."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        super().__init__(batches)
        self.ahead: list[ComputeAhead] = []

    def compute_ahead(self, command: ComputeAhead) -> None:
        self.ahead.append(command)


def ahead(
    spec: ModelSpec,
    request: GenerateRequest,
    *batches: Batch,
    settings: PoolLimits | None = None,
    leaves: bool = False,
) -> list[ComputeAhead]:
    """What is computed ahead. leaves: the client goes after the first event."""
    pool, engine = Pool([spec], settings), Hearing(batches)
    pool.make_engine = lambda **limits: engine

    async def gathered() -> None:
        async with aclosing(generate(request, pool)) as events:
            async for _ in events:
                if leaves:
                    return
        await asyncio.gather(*pool.engines[0].next_prompts.rendering._tasks)

    run(pool, gathered())
    return engine.ahead


@pytest.fixture
def spec(spec: ModelSpec) -> ModelSpec:
    return replace(spec, compute_ahead=70)


def a_word(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("b")


def test_a_conversation_goes_on_with_its_answer(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    (found,) = ahead(spec, CHAT, admitted(), said(a_word(tokenizer)), said(END, finish="stop"))
    marked = tokenizer.encode("<|im_start|>")
    beginning = [*marked, *tokenizer.encode("a"), *marked, *tokenizer.encode("b"), *marked]
    assert found == ComputeAhead("m", beginning, 70, cache_scope="k")


def test_what_is_not_to_be_stored_stays_off_the_disk(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    answer = (admitted(), said(a_word(tokenizer)), said(END, finish="stop"))
    (found,) = ahead(spec, replace(CHAT, on_disk=False), *answer)
    assert not found.on_disk


def test_nothing_follows_an_answer_that_was_cut(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    assert ahead(spec, CHAT, admitted(), said(a_word(tokenizer), finish="length")) == []


def test_nothing_follows_an_answer_whose_client_has_left(spec: ModelSpec) -> None:
    assert ahead(spec, CHAT, admitted(), leaves=True) == []


@pytest.mark.parametrize("prompt", ["a", (5, 6, 7)])
def test_a_text_has_no_next_turn(spec: ModelSpec, prompt: str | tuple[int, ...]) -> None:
    request = replace(CHAT, prompts=(prompt,))
    assert ahead(spec, request, admitted(), said(END, finish="stop")) == []


def test_of_several_answers_none_is_the_next_turns(spec: ModelSpec) -> None:
    two = (said(END, row=row, finish="stop") for row in (0, 1))
    assert ahead(spec, replace(CHAT, n=2), admitted(0, 1), *two) == []


def test_the_owner_turns_it_off(spec: ModelSpec) -> None:
    answer = (admitted(), said(END, finish="stop"))
    assert ahead(replace(spec, compute_ahead=0), CHAT, *answer) == []
    answer = (admitted(), said(END, finish="stop"))
    assert ahead(spec, CHAT, *answer, settings=PoolLimits(prompt_cache=0)) == []


def test_a_conversation_that_fills_the_context_has_no_next_turn(spec: ModelSpec) -> None:
    full = replace(CHAT, prompts=(Conversation((Message("user", "a" * 56),)),))
    assert ahead(spec, full, admitted(), said(END, finish="stop")) == []
