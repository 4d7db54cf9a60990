"""A request from its first event to its last, over an engine that says what the test wrote down."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from threading import get_ident

import pytest

from mlx_server.engine.messages import Command, ComputeAhead, Logprobs, PromptLogprobs, Stop
from mlx_server.errors import BadRequest, GenerationFailed
from mlx_server.events import Event, Finished, Started, TokenCounts
from mlx_server.generation.generate import generate
from mlx_server.messages import Conversation, Message
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.pool.engine_models import PoolLimits
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec
from mlx_server.requests import GenerateRequest
from tests.generation.scripted import (
    ASKED,
    END,
    FIRST,
    VOCABULARY,
    Batch,
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
)


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


@pytest.mark.parametrize("token", [VOCABULARY, -1, 2**40])
@pytest.mark.parametrize("param", ["prompt", "logit_bias"])
def test_a_token_id_outside_the_vocabulary_is_refused(
    spec: ModelSpec, param: str, token: int
) -> None:
    asked = {"prompts": ((1, token),)} if param == "prompt" else {"logit_bias": {token: 5.0}}
    error = refused(spec, replace(ASKED, **asked))
    assert isinstance(error, BadRequest)
    assert f"token id {token};" in error.message
    assert f"to {VOCABULARY - 1}." in error.message
    assert error.param == param


def test_ids_up_to_the_width_of_the_head_are_known(spec: ModelSpec) -> None:
    """Also those that the tokenizer has no text for."""
    last = VOCABULARY - 1
    [row] = rows_of(spec, replace(ASKED, prompts=((0, last),), logit_bias={0: -1.0, last: 1.0}))
    assert row.prompt == [0, last]
    assert row.sampling.logit_bias == {0: -1.0, last: 1.0}


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


CHAT = GenerateRequest("m", (Conversation((Message("user", "a"),)),), cache_scope="k")
FULL = replace(CHAT, prompts=(Conversation((Message("user", "a" * 56),)),))


class Hearing(Engine):
    """Keeps what it is to compute ahead."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        super().__init__(batches)
        self.ahead: list[ComputeAhead] = []

    def send(self, command: Command) -> None:
        if isinstance(command, ComputeAhead):
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


@pytest.mark.parametrize(
    ("request_", "rows", "stop", "owner", "settings"),
    [
        pytest.param(CHAT, 1, "length", 70, None, id="it was cut"),
        pytest.param(replace(CHAT, prompts=("a",)), 1, "stop", 70, None, id="a text"),
        pytest.param(replace(CHAT, prompts=((5, 6),)), 1, "stop", 70, None, id="token ids"),
        pytest.param(replace(CHAT, n=2), 2, "stop", 70, None, id="several answers"),
        pytest.param(CHAT, 1, "stop", 0, None, id="off"),
        pytest.param(CHAT, 1, "stop", 70, PoolLimits(prompt_cache=0), id="no cache"),
        pytest.param(FULL, 1, "stop", 70, None, id="it fills the context"),
    ],
)
def test_nothing_is_computed_ahead_where_no_turn_can_follow(
    spec: ModelSpec,
    request_: GenerateRequest,
    rows: int,
    stop: Stop,
    owner: int,
    settings: PoolLimits | None,
) -> None:
    answers = (said(END, row=row, finish=stop) for row in range(rows))
    owned = replace(spec, compute_ahead=owner)
    assert ahead(owned, request_, admitted(*range(rows)), *answers, settings=settings) == []


# The tokens of a row become text, log probabilities and an end.


def test_a_stop_string_across_tokens_ends_the_row_at_once(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("yes</b> and more")
    assert len(tokenizer.encode("</b>")) > 1
    pool, engine = pooled(spec, admitted(), said(ids[:5]), said(ids[5:]))
    request = replace(ASKED, stop=("</b>",))

    async def test() -> list[Event]:
        events = []
        async for event in generate(request, pool):
            events.append(event)
            if isinstance(event, Finished):
                # `n` answers: the others go on, so this one must not wait for the end
                assert not engine.done
        return events

    events = run(pool, test())
    assert text_of(events) == "yes"
    tokens = len(tokenizer.encode("yes</b>"))
    (end,) = finished(events)
    counts = TokenCounts(tokens, text_tokens=tokens)
    assert end == Finished(0, "stop", counts, stop_string="</b>")
    assert engine.cancelled == [FIRST]


def test_a_row_that_met_its_stop_string_is_cancelled_while_others_go_on(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    more = said(tokenizer.encode("no stop"), 1)
    pool, engine = pooled(
        spec,
        [*admitted(0, 1), *said(tokenizer.encode("a."), 0), *more[:1]],
        [*said(tokenizer.encode("late"), 0), *more[1:]],
        said(END, 1, "stop"),
    )
    cancelled: list[list[int]] = []

    async def test() -> list[Event]:
        events = []
        async for event in generate(replace(ASKED, n=2, stop=(".",)), pool):
            events.append(event)
            cancelled.append(list(engine.cancelled))
        return events

    events = run(pool, test())
    assert (text_of(events, 0), text_of(events, 1)) == ("a", "no stop")
    assert [event.index for event in finished(events)] == [0, 1]
    assert cancelled[-1] == [FIRST]


def test_a_prompts_log_probabilities_keep_no_other_stream_waiting(
    spec: ModelSpec, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens are converted to text at once as the prompt has, and 20 times as many."""
    threads = set[int]()
    spelling = Tokenizer.spelling

    def observed(tokenizer: Tokenizer, token: int) -> str:
        threads.add(get_ident())
        return spelling(tokenizer, token)

    monkeypatch.setattr(Tokenizer, "spelling", observed)
    prompt = tokenizer.encode("Hello")
    asked = replace(ASKED, prompts=(tuple(prompt),), echo=True, logprobs=1, max_tokens=0)
    scored = PromptLogprobs(FIRST, [Logprobs(-1.0, [(5, -0.1)])] * (len(prompt) - 1))
    answered(spec, asked, [*admitted(), scored])
    assert threads
    assert get_ident() not in threads
