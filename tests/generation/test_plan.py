"""The rows of a request: their lengths, their sampling and the memory they need."""

from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_server import limits
from mlx_server.engine.messages import KvCost
from mlx_server.errors import ContextTooLong, GenerationFailed
from mlx_server.generation.generate import generate
from mlx_server.pool.prepare import ModelSpec
from mlx_server.requests import SamplingParams
from tests.generation.scripted import (
    ASKED,
    CONTEXT,
    KV_BYTES,
    PUBLISHERS,
    admitted,
    pooled,
    refused,
    rows_of,
    run,
)


def test_each_of_n_answers_draws_on_its_own(spec: ModelSpec) -> None:
    request = replace(ASKED, prompts=("a", "b"), n=3, seed=7)
    assert [row.sampling.seed for row in rows_of(spec, request)] == [7, 8, 9, 7, 8, 9]
    unset = rows_of(spec, replace(request, seed=None))
    assert [row.sampling.seed for row in unset] == [None] * 6


@pytest.mark.parametrize(
    ("asked", "owners", "granted"),
    [
        (None, None, CONTEXT - 10),
        (5, None, 5),
        (CONTEXT - 10, None, CONTEXT - 10),
        (10_000, None, CONTEXT - 10),
        (None, 20, 20),
        (30, 20, 30),
        (None, 10_000, CONTEXT - 10),
    ],
)
def test_an_answer_gets_the_room_that_is_left(
    spec: ModelSpec, asked: int | None, owners: int | None, granted: int
) -> None:
    request = replace(ASKED, prompts=((1,) * 10,), max_tokens=asked)
    assert rows_of(replace(spec, max_tokens=owners), request)[0].max_tokens == granted


def test_the_owner_may_shorten_the_context(spec: ModelSpec) -> None:
    request = replace(ASKED, prompts=((1,) * 10,))
    assert rows_of(replace(spec, context_length=12), request)[0].max_tokens == 2
    assert isinstance(refused(replace(spec, context_length=10), request), ContextTooLong)


def test_the_request_chooses_before_the_owner_before_the_publisher(spec: ModelSpec) -> None:
    [publishers] = rows_of(spec, ASKED)
    assert publishers.sampling == PUBLISHERS

    owned = replace(spec, choices={"temperature": 0.1, "min_p": 0.2, "top_k": 7})
    [owners] = rows_of(owned, ASKED)
    assert owners.sampling == SamplingParams(temperature=0.1, top_p=0.95, top_k=7, min_p=0.2)

    asked = replace(
        ASKED,
        choices={"temperature": 0.0, "top_k": 0, "presence_penalty": 1.0},
        seed=3,
        logprobs=2,
        logit_bias={5: 1.0},
    )
    [both] = rows_of(owned, asked)
    assert both.sampling == SamplingParams(
        temperature=0.0,
        top_k=0,
        top_p=0.95,
        min_p=0.2,
        presence_penalty=1.0,
        seed=3,
        logprobs=2,
        logit_bias={5: 1.0},
    )


def test_where_nobody_chooses_openais_defaults_hold(spec: ModelSpec, tmp_path: Path) -> None:
    for file in Path(spec.source).iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    [row] = rows_of(replace(spec, source=str(tmp_path)), ASKED)
    assert row.sampling == SamplingParams()
    assert (row.sampling.temperature, row.sampling.top_p) == (1.0, 1.0)


def test_memory_is_set_aside_for_every_token_there_may_be(spec: ModelSpec) -> None:
    request = replace(ASKED, prompts=((1,) * 10, (1,) * 20), n=2, max_tokens=7)
    pool, _ = pooled(spec, admitted(0, 1, 2, 3), GenerationFailed("enough"))

    async def test() -> None:
        async with aclosing(generate(request, pool)) as events:
            await anext(events)
            longest = KvCost(KV_BYTES).for_tokens(20 + 7)
            assert pool.memory()["kv_reserved"] == 4 * longest > 0, "all are padded to it"

    run(pool, test())


def test_an_answer_without_end_is_not_given_the_whole_memory(spec: ModelSpec) -> None:
    request = replace(ASKED, prompts=((1,) * 10,))
    assert (
        rows_of(replace(spec, context_length=100_000), request)[0].max_tokens
        == limits.ANSWER_TOKENS
    )
    asked = replace(request, max_tokens=limits.ANSWER_TOKENS + 5)
    [row] = rows_of(replace(spec, context_length=100_000), asked)
    assert row.max_tokens == limits.ANSWER_TOKENS + 5
