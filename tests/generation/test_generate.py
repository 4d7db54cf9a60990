"""The spine over an engine that says what the test wrote down."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from mlx_server import limits
from mlx_server.checkpoints.tokenizer import Tokenizer
from mlx_server.engine.kv_cost import KvCost
from mlx_server.engine.messages import (
    Admitted,
    Generate,
    Logprobs,
    Prefilled,
    PromptLogprobs,
    Stop,
    Token,
)
from mlx_server.engine.row_stream import Item, RowStream
from mlx_server.errors import (
    BadRequest,
    ContextTooLong,
    GenerationFailed,
    ModelNotFound,
    Overloaded,
    ServerError,
)
from mlx_server.events import Event, Finished, Started, TextDelta
from mlx_server.families.smollm2 import SMOLLM2
from mlx_server.generation.generate import generate
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.pool import prepare as preparing
from mlx_server.pool.pool import Pool
from mlx_server.pool.pool_limits import PoolLimits
from mlx_server.pool.prepare import ModelSpec
from mlx_server.requests import GenerateRequest, SamplingParams
from mlx_server.sources.replay_checkpoint import replay_checkpoint
from tests.engine.stub import StubEngine
from tests.families import byte_level, write_checkpoint

CONTEXT = 60
VOCABULARY = 500
KV_BYTES = 1000
"""Of a token."""
FIRST = 40
"""The engine's number of a request's first row."""

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"

Batch = list[Item] | ServerError
T = TypeVar("T")


class Engine(StubEngine):
    """Says one batch after the other, and keeps what it is asked."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        super().__init__(VOCABULARY, KvCost(KV_BYTES))
        self.rows: list[Generate] = []
        self.cancelled: list[int] = []
        self.done = False
        self._batches = list(batches)

    @asynccontextmanager
    async def generate(self, rows: Sequence[Generate]) -> AsyncIterator[RowStream]:
        for number, row in enumerate(rows, start=FIRST):
            row.row = number
        self.rows = list(rows)
        try:
            yield cast(RowStream, self)
        finally:
            self.done = True
            self.cancel([row.row for row in rows])

    def cancel(self, rows: Sequence[int]) -> None:
        self.cancelled += [row for row in rows if row not in self.cancelled]

    async def take(self) -> list[Item]:
        assert self._batches, "asked for more than there is"
        batch = self._batches.pop(0)
        if isinstance(batch, ServerError):
            raise batch
        return batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(
        tmp_path_factory.mktemp("model"),
        byte_level(),
        config={"model_type": "llama", "max_position_embeddings": CONTEXT, "eos_token_id": 0},
        tokenizer_config={"chat_template": TEMPLATE, "eos_token": "<|im_end|>"},
        generation_config={"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    )
    (path / "model.safetensors").touch()
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder / "tokenizer.json")


@pytest.fixture
def spec(folder: Path) -> ModelSpec:
    return ModelSpec("m", str(folder))


PUBLISHERS = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
ASKED = GenerateRequest("m", ("Hello",))


@pytest.fixture(autouse=True)
def weightless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of these models hold no weights to be measured."""
    monkeypatch.setattr(preparing, "weights_bytes", lambda path, upcast: 0)


def pooled(spec: ModelSpec, *batches: Batch) -> tuple[Pool, Engine]:
    pool, engine = Pool([spec]), Engine(batches)
    pool.make_engine = lambda **limits: engine
    return pool, engine


def run(pool: Pool, test: Coroutine[Any, Any, T]) -> T:
    """Nothing may be left of it: no answer, no lease, no reserved memory."""

    async def started() -> T:
        await pool.start()
        try:
            return await asyncio.wait_for(test, 20)
        finally:
            assert pool.rows == 0
            assert pool.memory()["kv_reserved"] == 0
            assert [view.leases for view in pool.views()] == [0]
            await pool.stop()

    return asyncio.run(started())


def answered(
    spec: ModelSpec, request: GenerateRequest, *batches: Batch
) -> tuple[list[Event], Engine]:
    pool, engine = pooled(spec, *batches)

    async def gathered() -> list[Event]:
        return [event async for event in generate(request, pool)]

    events = run(pool, gathered())
    assert engine.done
    assert pool.rows == 0
    assert not engine._batches, "not all was taken"
    return events, engine


def refused(spec: ModelSpec, request: GenerateRequest) -> ServerError:
    """The error of a request, which comes before any row is sent."""
    pool, engine = pooled(spec)

    async def first() -> None:
        async with aclosing(generate(request, pool)) as events:
            await anext(events)

    with pytest.raises(ServerError) as caught:
        run(pool, first())
    assert engine.rows == []
    assert pool.rows == 0
    return caught.value


def rows_of(spec: ModelSpec, request: GenerateRequest) -> list[Generate]:
    """The rows that the engine is asked for."""
    pool, engine = pooled(spec, GenerationFailed("enough"))

    async def first() -> None:
        async with aclosing(generate(request, pool)) as events:
            await anext(events)

    with pytest.raises(GenerationFailed):
        run(pool, first())
    return engine.rows


def said(ids: list[int], row: int = 0, finish: Stop | None = None, **more: Any) -> list[Item]:
    """Tokens of one row; `finish` comes with the last."""
    last = len(ids) - 1
    return [
        Token(FIRST + row, id, finish if place == last else None, **more)
        for place, id in enumerate(ids)
    ]


def admitted(*rows: int) -> list[Item]:
    return [Admitted(FIRST + row) for row in rows or (0,)]


def text_of(events: list[Event], index: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta) and e.index == index)


def finished(events: list[Event]) -> list[Finished]:
    return [event for event in events if isinstance(event, Finished)]


END = [0]


def without_fingerprint(event: Event) -> Started:
    """It differs by version and by the files of the model."""
    assert isinstance(event, Started)
    assert event.fingerprint
    return replace(event, fingerprint=None)


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


def test_a_conversation_is_rendered_and_what_it_can_not_have_is_told(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    tools = (Tool("f"),)
    asked = [
        Conversation((Message("user", "Hi"),), tools, {"x": 1}),
        Conversation((Message("user", "Ho"),), tools, {"y": 1}),
    ]
    events, engine = answered(
        replace(spec, tools_in_prompt="never"),
        replace(ASKED, prompts=tuple(asked)),
        [*admitted(0, 1), *said(END, 0, "stop"), *said(END, 1, "stop")],
    )
    prompts = [tokenizer.encode(f"<|im_start|>{word}") for word in ("Hi", "Ho")]
    assert [row.prompt for row in engine.rows] == prompts
    ignored = ("chat_template_kwargs.x", "tools", "chat_template_kwargs.y")
    expected = Started("m", sum(map(len, prompts)), ignored, sampling=PUBLISHERS)
    assert without_fingerprint(events[0]) == expected


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
    assert end == Finished(0, "stop", tokens, 0, text_tokens=tokens, stop_string="</b>")
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


def test_what_a_stop_string_might_have_been_is_told_at_the_end(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("yes</")
    events, _ = answered(
        spec, replace(ASKED, stop=("</b>",)), admitted(), said(ids, finish="length")
    )
    assert text_of(events) == "yes</"
    assert finished(events) == [Finished(0, "length", len(ids), 0, text_tokens=len(ids))]


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


def test_each_of_n_answers_draws_on_its_own(spec: ModelSpec) -> None:
    request = replace(ASKED, prompts=("a", "b"), n=3, seed=7)
    assert [row.sampling.seed for row in rows_of(spec, request)] == [7, 8, 9, 7, 8, 9]
    unset = rows_of(spec, replace(request, seed=None))
    assert [row.sampling.seed for row in unset] == [None] * 6


def test_characters_in_several_tokens_come_whole(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    ids = [byte_id(tokenizer, byte) for byte in "é🙂".encode()]
    events, _ = answered(
        spec,
        replace(ASKED, logprobs=0),
        admitted(),
        *(said([id], logprobs=Logprobs(-1.0, [])) for id in ids),
        said(END, finish="stop"),
    )
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert [delta.text for delta in deltas] == ["é", "🙂"]
    assert [len(delta.logprobs) for delta in deltas] == [2, 4]
    assert b"".join(entry.bytes for d in deltas for entry in d.logprobs) == "é🙂".encode()


def test_an_answer_that_ends_inside_a_character_says_so(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    ids = [byte_id(tokenizer, byte) for byte in "a🙂".encode()[:3]]
    events, _ = answered(spec, ASKED, admitted(), said(ids, finish="length"))
    assert text_of(events) == "a�"


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    every = range(tokenizer.vocabulary)
    return next(id for id in every if tokenizer.bytes_of(id) == bytes([byte]))


def test_every_tokens_logprob_is_told_also_of_those_without_text(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    silent = tokenizer.encode("<|im_start|>")
    ids = [*silent, *tokenizer.encode("ab"), *silent, *tokenizer.encode("c"), *silent, *silent]
    events, _ = answered(
        spec,
        replace(ASKED, logprobs=0, stop=("cd",)),
        admitted(),
        said(ids, logprobs=Logprobs(-0.5, [])),
        said(END, finish="stop", logprobs=Logprobs(-0.1, [])),
    )
    entries = [e for d in events if isinstance(d, TextDelta) for e in d.logprobs]
    assert [entry.token for entry in entries] == [tokenizer.spelling(id) for id in ids]
    assert text_of(events) == "abc"


def test_a_logprob_has_its_token_its_bytes_and_the_alternatives(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    a, b = byte_id(tokenizer, ord("a")), byte_id(tokenizer, 0xF0)
    found = Logprobs(-0.25, [(a, -0.25), (b, -1.5), (VOCABULARY - 1, -9.0)])
    events, _ = answered(
        spec, replace(ASKED, logprobs=3), admitted(), said([a], finish="length", logprobs=found)
    )
    [entry] = [e for d in events if isinstance(d, TextDelta) for e in d.logprobs]
    assert (entry.token, entry.bytes, entry.logprob) == ("a", b"a", -0.25)
    reported = [(top.token, top.bytes, top.logprob, top.top) for top in entry.top]
    assert reported == [("a", b"a", -0.25, ()), ("�", b"\xf0", -1.5, ()), ("", b"", -9.0, ())]


def test_an_echo_begins_each_answer(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    events, engine = answered(
        spec,
        replace(ASKED, prompts=("One two", "Three"), echo=True, stop=("e",)),
        admitted(0, 1),
        [*said(tokenizer.encode(" yes"), 0), *said(END, 1, "stop")],
    )
    # a stop string ends an answer, not its prompt
    assert (text_of(events, 0), text_of(events, 1)) == ("One two y", "Three")
    assert [row.prompt_logprobs for row in engine.rows] == [False, False]


def test_an_echo_with_logprobs_scores_the_prompt(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Hello")
    scored = PromptLogprobs(
        FIRST, [Logprobs(-float(i), [(5, -0.1)]) for i in range(1, len(prompt))]
    )
    events, engine = answered(
        spec,
        replace(ASKED, echo=True, logprobs=1),
        [*admitted(), scored],
        said(tokenizer.encode("!"), finish="length", logprobs=Logprobs(-0.5, [])),
    )
    assert engine.rows[0].prompt_logprobs
    _, echo, answer, end = events
    assert isinstance(echo, TextDelta)
    assert echo.text == "Hello"
    assert [entry.logprob for entry in echo.logprobs] == [
        None,
        *(-float(i) for i in range(1, len(prompt))),
    ]
    assert [len(entry.top) for entry in echo.logprobs] == [0] + [1] * (len(prompt) - 1)
    assert "".join(entry.token for entry in echo.logprobs) == "Hello"
    assert isinstance(answer, TextDelta)
    assert (answer.text, len(answer.logprobs)) == ("!", 1)
    assert end == Finished(0, "length", 1, 0, text_tokens=1)


def test_scoring_alone_makes_no_tokens(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("a")
    events, engine = answered(
        spec,
        replace(ASKED, prompts=(tuple(prompt),), echo=True, max_tokens=0),
        [*admitted(), PromptLogprobs(FIRST, [])],
    )
    assert (engine.rows[0].prompt_logprobs, engine.rows[0].max_tokens) == (True, 0)
    assert text_of(events) == "a"
    assert events[-1] == Finished(0, "length", 0, 0)


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


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 1000])
def test_a_prompt_that_leaves_no_room_is_refused(spec: ModelSpec, length: int) -> None:
    error = refused(spec, replace(ASKED, prompts=("fits", (1,) * length)))
    assert isinstance(error, ContextTooLong)
    assert f"has at least {length} tokens" in error.message
    assert f"is {CONTEXT} tokens" in error.message
    assert error.param == "prompt"


def test_the_longest_prompt_leaves_room_for_one_token(spec: ModelSpec) -> None:
    [row] = rows_of(spec, replace(ASKED, prompts=((1,) * (CONTEXT - 1),)))
    assert (len(row.prompt), row.max_tokens) == (CONTEXT - 1, 1)


def test_messages_that_are_too_long_are_called_so(spec: ModelSpec) -> None:
    long = Conversation((Message("user", "a " * CONTEXT),))
    error = refused(spec, replace(ASKED, prompts=(long,)))
    assert isinstance(error, ContextTooLong)
    assert error.param == "messages"


@pytest.mark.parametrize(
    ("prompt", "param"), [("", "prompt"), ((), "prompt"), (Conversation(()), "messages")]
)
def test_an_empty_prompt_is_refused(spec: ModelSpec, prompt: Any, param: str) -> None:
    error = refused(spec, replace(ASKED, prompts=("x", prompt)))
    assert isinstance(error, BadRequest)
    assert (error.message, error.param) == ("The prompt is empty.", param)


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
    assert pool.rows == 0


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
            assert pool.rows == 2
            assert not engine.done
        assert engine.cancelled == [FIRST, FIRST + 1]
        assert pool.rows == 0

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
        assert (engine.cancelled, pool.rows) == ([FIRST], 0)

    run(pool, test())


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
        == limits.ANSWER_TOKENS.value
    )
    asked = replace(request, max_tokens=limits.ANSWER_TOKENS.value + 5)
    [row] = rows_of(replace(spec, context_length=100_000), asked)
    assert row.max_tokens == limits.ANSWER_TOKENS.value + 5


def test_what_was_cached_of_the_prompt_is_told_at_the_end(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    events, _ = answered(
        spec,
        replace(ASKED, n=2),
        [*admitted(0, 1), Prefilled(FIRST, 3)],
        [*said(tokenizer.encode("a"), 0, "length"), Prefilled(FIRST + 1, 4)],
        said(END, 1, "stop"),
    )
    assert [(event.index, event.cached_tokens) for event in finished(events)] == [(0, 3), (1, 4)]


# Replay models


@pytest.fixture
def replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelSpec]:
    """A replay model with these entries."""
    monkeypatch.setenv("MLX_SERVER_CACHE", str(tmp_path))

    def made(*entries: Mapping[str, Any], family: str = "smollm2") -> ModelSpec:
        path = tmp_path / "said.jsonl"
        path.write_text("\n".join(map(json.dumps, entries)), "utf-8")
        return ModelSpec("m", f"replay:{path}", family=family)

    return made


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
    assert (row.delay, row.max_tokens) == (0.25, limits.ANSWER_TOKENS.value)


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
