"""A request from its first event to its last, over an engine that says what the test wrote down."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from mlx_server.checkpoints.tokenizer import Tokenizer
from mlx_server.engine.row_stream import Item
from mlx_server.errors import BadRequest, GenerationFailed, ModelNotFound, Overloaded
from mlx_server.events import Event, Finished, Started, TextDelta
from mlx_server.generation.generate import generate
from mlx_server.pool.engine_models import PoolLimits
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec
from tests.generation.scripted import (
    ASKED,
    END,
    FIRST,
    PUBLISHERS,
    VOCABULARY,
    Engine,
    admitted,
    answered,
    finished,
    pooled,
    refused,
    rows_of,
    run,
    said,
    text_of,
    without_fingerprint,
)


def test_an_answer_begins_with_started_and_ends_with_finished(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    hello = tokenizer.encode("Good day.")
    events, engine = answered(
        spec, ASKED, admitted(), said(hello[:2]), said(hello[2:]), said(END, finish="stop")
    )
    prompt = tokenizer.encode("Hello")
    assert without_fingerprint(events[0]) == Started("m", len(prompt), sampling=PUBLISHERS)
    assert events[-1] == Finished(0, "stop", len(hello) + 1, 0, text_tokens=len(hello))
    assert all(isinstance(event, TextDelta) for event in events[1:-1])
    assert text_of(events) == "Good day."
    row = engine.rows[0]
    assert (row.model, row.prompt, row.prompt_logprobs) == ("m", prompt, False)
    assert row.stop_tokens == sorted({0, *tokenizer.encode("<|im_end|>")})


def test_started_comes_first_even_if_a_row_is_quicker(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    quick = said(tokenizer.encode("quick"), 0)
    slow = said(tokenizer.encode("slow"), 1)
    events, _ = answered(
        spec,
        replace(ASKED, n=2),
        [*admitted(0), *quick, *said(END, 0, "stop")],
        admitted(1),
        [*slow, *said(END, 1, "stop")],
    )
    assert isinstance(events[0], Started)
    assert sum(isinstance(event, Started) for event in events) == 1
    assert (text_of(events, 0), text_of(events, 1)) == ("quick", "slow")
    assert [event.index for event in finished(events)] == [0, 1]


def test_answers_of_several_prompts_are_told_apart(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    request = replace(ASKED, prompts=("one", "three"), n=2)
    batch = admitted(0, 1, 2, 3)
    for row in range(4):
        batch += said([*tokenizer.encode(f"answer {row}")], row, "length")
    events, engine = answered(spec, request, batch)
    one, three = tokenizer.encode("one"), tokenizer.encode("three")
    assert [row.prompt for row in engine.rows] == [one, one, three, three]
    assert isinstance(events[0], Started)
    assert events[0].prompt_tokens == len(one) + len(three)
    for index in range(4):
        assert text_of(events, index) == f"answer {index}"
    counted = {event.index: event.completion_tokens for event in finished(events)}
    assert counted == {i: len(tokenizer.encode(f"answer {i}")) for i in range(4)}


@pytest.mark.parametrize("token", [VOCABULARY, -1, 2**40])
def test_a_token_id_outside_the_vocabulary_is_refused(spec: ModelSpec, token: int) -> None:
    error = refused(spec, replace(ASKED, prompts=((1, token),)))
    assert isinstance(error, BadRequest)
    assert f"token id {token};" in error.message
    assert f"to {VOCABULARY - 1}." in error.message
    assert error.param == "prompt"


@pytest.mark.parametrize("token", [VOCABULARY, -1, 2**40])
def test_a_bias_outside_the_vocabulary_is_refused(spec: ModelSpec, token: int) -> None:
    error = refused(spec, replace(ASKED, logit_bias={1: 1.0, token: 5.0}))
    assert isinstance(error, BadRequest)
    assert f"token id {token};" in error.message
    assert error.param == "logit_bias"


def test_ids_up_to_the_width_of_the_head_are_known(spec: ModelSpec) -> None:
    """Also those that the tokenizer has no text for."""
    last = VOCABULARY - 1
    [row] = rows_of(spec, replace(ASKED, prompts=((0, last),), logit_bias={0: -1.0, last: 1.0}))
    assert row.prompt == [0, last]
    assert row.sampling.logit_bias == {0: -1.0, last: 1.0}


def test_an_unknown_model_and_a_full_queue_are_told_first(spec: ModelSpec) -> None:
    assert isinstance(refused(spec, replace(ASKED, model="n")), ModelNotFound)
    pool, engine = Pool([spec], PoolLimits(concurrency=1, queue=0)), Engine([admitted()])
    pool.make_engine = lambda **limits: engine

    async def test() -> None:
        async with aclosing(generate(ASKED, pool)) as first:
            await anext(first)
            with pytest.raises(Overloaded):
                await anext(generate(ASKED, pool))

    run(pool, test())


def test_a_row_that_fails_ends_the_request_and_frees_the_others(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    pool, engine = pooled(
        spec,
        admitted(0, 1, 2),
        said(tokenizer.encode("so far"), 1),
        GenerationFailed("The answer could not be generated."),
    )
    events: list[Event] = []

    async def test() -> None:
        async for event in generate(replace(ASKED, n=3), pool):
            events.append(event)

    with pytest.raises(GenerationFailed):
        run(pool, test())
    assert text_of(events, 1) == "so far"
    assert finished(events) == []
    assert engine.cancelled == [FIRST, FIRST + 1, FIRST + 2]
    assert pool.row_slots.taken == 0


def test_a_row_that_fails_before_it_is_taken_fails_before_started(spec: ModelSpec) -> None:
    pool, engine = pooled(spec, admitted(0), GenerationFailed("no room"))

    async def test() -> None:
        await anext(generate(replace(ASKED, n=2), pool))

    with pytest.raises(GenerationFailed):
        run(pool, test())
    assert engine.cancelled == [FIRST, FIRST + 1]


@pytest.mark.parametrize("taken", [1, 2])
def test_closing_early_frees_every_row(spec: ModelSpec, tokenizer: Tokenizer, taken: int) -> None:
    pool, engine = pooled(spec, admitted(0, 1), said(tokenizer.encode("abc"), 0))

    async def test() -> None:
        async with aclosing(generate(replace(ASKED, n=2), pool)) as events:
            for _ in range(taken):
                await anext(events)
            assert pool.row_slots.taken == 2
            assert not engine.done
        assert engine.cancelled == [FIRST, FIRST + 1]
        assert pool.row_slots.taken == 0

    run(pool, test())


def test_a_client_that_goes_while_it_waits_frees_every_row(spec: ModelSpec) -> None:
    pool, engine = pooled(spec)
    waiting = asyncio.Event()

    async def take() -> list[Item]:
        waiting.set()
        return await asyncio.Future()

    engine.take = take  # type: ignore[method-assign]

    async def test() -> None:
        asking = asyncio.create_task(anext(generate(ASKED, pool)))
        await waiting.wait()
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        assert (engine.cancelled, pool.row_slots.taken) == ([FIRST], 0)

    run(pool, test())
