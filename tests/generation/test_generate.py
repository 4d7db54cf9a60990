"""A request from its first event to its last, over an engine that says what the test wrote down."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.engine.messages import Command, ComputeAhead, KvCost, Logprobs, PromptLogprobs, Stop
from mlx_server.errors import BadRequest, ContextTooLong, GenerationFailed
from mlx_server.events import Event, Finished, Started, TokenCounts
from mlx_server.families.json_families import SMOLLM2
from mlx_server.generation.constraints import is_format_required
from mlx_server.generation.generate import generate
from mlx_server.generation.plan import prepared_for
from mlx_server.generation.rendering import without_volatile_lines
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.pool.engine_models import PoolLimits
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec, PreparedModel, Task
from mlx_server.requests import GenerateRequest, JsonFormat, SamplingParams
from mlx_server.sources.replay_checkpoint import replay_checkpoint
from tests.generation.scripted import (
    ASKED,
    CONTEXT,
    END,
    FIRST,
    KV_BYTES,
    PUBLISHERS,
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
    without_fingerprint,
)
from tests.tables import cases


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


def found(spec: ModelSpec, task: Task, name: str = "m") -> PreparedModel:
    pool, _ = pooled(spec)
    return run(pool, prepared_for(task, name, pool))


def test_another_task_is_refused_with_the_route_of_its_own(spec: ModelSpec) -> None:
    assert found(spec, "generate").id == "m"
    with pytest.raises(BadRequest, match=r"/v1/chat/completions.*`task: embed`") as refused:
        found(spec, "embed")
    assert refused.value.param == "model"


LINE = "x-anthropic-billing-header: cc_version=2.1.100; cch=eb6c6;"
HI = Message("user", "Hi")


def test_they_are_taken_out_of_conversations_and_named_once() -> None:
    chat = Conversation((Message("system", f"{LINE}\nBe brief."), HI))
    request = replace(ASKED, prompts=(chat, LINE, chat))
    cleaned, names = without_volatile_lines(request)
    short = Conversation((Message("system", "Be brief."), HI))
    assert cleaned.prompts == (short, LINE, short)
    assert names == ("x-anthropic-billing-header",)


Replayed = Callable[..., ModelSpec]


@pytest.fixture
def bytes_of_smollm2(tmp_path: Path) -> Tokenizer:
    return Tokenizer(replay_checkpoint(tmp_path / "own", SMOLLM2) / "tokenizer.json")


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


@pytest.mark.parametrize(
    ("entry", "family", "forced"),
    [
        ({"output_token_ids": [7, 258, 7]}, "smollm2", 3),
        ({"output": ""}, "smollm2", 0),
        ({"output": "Hi"}, "plain", 2),  # a family without a stop token of its own
    ],
)
def test_an_output_ends_with_a_stop_token(
    replayed: Replayed, entry: dict[str, object], family: str, forced: int
) -> None:
    [row] = rows_of(replayed(entry, family=family), ASKED)
    assert row.forced_tokens
    *output, stop = row.forced_tokens
    assert (len(output), stop) == (forced, row.stop_tokens[0])
    assert output == entry.get("output_token_ids", output)


@pytest.mark.parametrize(("asked", "granted"), [(None, 5), (100, 5), (5, 5), (3, 3)])
def test_an_output_that_was_cut_is_cut_there(
    replayed: Replayed, asked: int | None, granted: int
) -> None:
    entry = {"output": "Hello", "finish": "length"}
    [row] = rows_of(replayed(entry), replace(ASKED, max_tokens=asked))
    assert row.max_tokens == granted


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


# Prompts are rendered, and refused where they are empty or too long.


def test_a_conversation_is_rendered_and_what_it_can_not_have_is_told(
    spec: ModelSpec, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    spec = replace(spec, template_kwargs={"mispelt": 1})
    asked = [
        Conversation((Message("user", "Hi"),), (), {"x": 1}),
        Conversation((Message("user", "Ho"),), (), {"y": 1}),
    ]
    events, engine = answered(
        spec,
        replace(ASKED, prompts=tuple(asked)),
        [*admitted(0, 1), *said(END, 0, "stop"), *said(END, 1, "stop")],
    )
    prompts = [tokenizer.encode(f"<|im_start|>{word}") for word in ("Hi", "Ho")]
    assert [row.prompt for row in engine.rows] == prompts
    ignored = ("chat_template_kwargs.x", "chat_template_kwargs.y")
    expected = Started("m", sum(map(len, prompts)), ignored, sampling=PUBLISHERS)
    assert without_fingerprint(events[0]) == expected
    assert caplog.text.count("m: its template does not read `mispelt` of `template_kwargs`") == 1


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 1000])
def test_a_prompt_that_leaves_no_room_is_refused(spec: ModelSpec, length: int) -> None:
    error = refused(spec, replace(ASKED, prompts=("fits", (1,) * length)))
    assert isinstance(error, ContextTooLong)
    assert f"has at least {length} tokens" in error.message
    assert f"is {CONTEXT} tokens" in error.message
    assert error.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "param"), [("", "prompt"), ((), "prompt"), (Conversation(()), "messages")]
)
def test_an_empty_prompt_is_refused(spec: ModelSpec, prompt: Any, param: str) -> None:
    error = refused(spec, replace(ASKED, prompts=("x", prompt)))
    assert isinstance(error, BadRequest)
    assert (error.message, error.param) == ("The prompt is empty.", param)


SAID = Conversation((Message("user", "Hi"),))
A_CHAT = replace(ASKED, prompts=(SAID,))
LIST = JsonFormat({"type": "array", "items": {"type": "integer"}})


def test_rows_of_one_prompt_share_their_grammar(spec: ModelSpec) -> None:
    first, second = rows_of(spec, replace(A_CHAT, format=LIST, n=2))
    assert first.grammar
    assert second.grammar is first.grammar
    assert [row.grammar for row in rows_of(spec, A_CHAT)] == [None]


@pytest.mark.parametrize("prompt", [SAID, "Hi"])
def test_nothing_is_constrained_unless_it_is_asked_for(spec: ModelSpec, prompt: Any) -> None:
    [row] = rows_of(spec, replace(ASKED, prompts=(prompt,), tool_choice="auto"))
    assert (row.grammar, row.thinking) == (None, None)


@pytest.mark.parametrize(
    ("asked", "required"),
    [
        ({}, False),
        ({"format": LIST}, True),
        ({"tool_choice": "required"}, True),
        ({"prompts": (replace(SAID, tools=(Tool("f"),)),)}, False),
        (
            {"prompts": (SAID, replace(SAID, tools=(Tool("g"), Tool("f", strict=True))))},
            True,
        ),
    ],
)
def test_what_a_client_requires(asked: dict[str, Any], required: bool) -> None:
    assert is_format_required(replace(A_CHAT, **asked)) == required


@cases
def test_a_budget_is_the_requests_or_none_at_all(
    replayed: Callable[..., ModelSpec],
    owners: dict[str, Any],
    clients: dict[str, Any],
    asked: int | None,
    budget: int | None,
) -> None:
    spec = replace(replayed({"output": "x"}, family="qwen3"), template_kwargs=owners)
    chat = replace(SAID, template_kwargs=clients)
    [row] = rows_of(spec, replace(A_CHAT, prompts=(chat,), thinking_budget=asked))
    if budget is None:
        assert row.thinking is None
    else:
        assert row.thinking
        assert row.thinking.budget is not None
        spent = budget - row.thinking.budget
        assert 0 <= spent <= max(0, budget - 1), "what leads out of reasoning counts"
