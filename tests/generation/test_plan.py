"""The rows of a request: their lengths, their sampling and the memory they need."""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.engine.messages import KvCost
from mlx_server.errors import BadRequest, ContextTooLong, GenerationFailed
from mlx_server.events import Started
from mlx_server.families.json_families import SMOLLM2
from mlx_server.generation.constraints import is_format_required
from mlx_server.generation.generate import generate
from mlx_server.generation.plan import prepared_for
from mlx_server.generation.rendering import without_volatile_lines
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.pool.prepare import ModelSpec, PreparedModel, Task
from mlx_server.requests import JsonFormat, SamplingParams
from mlx_server.sources.replay_checkpoint import replay_checkpoint
from tests.generation.scripted import (
    ASKED,
    CONTEXT,
    END,
    KV_BYTES,
    PUBLISHERS,
    admitted,
    answered,
    pooled,
    refused,
    rows_of,
    run,
    said,
    without_fingerprint,
)
from tests.tables import cases


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
CHAT = replace(ASKED, prompts=(SAID,))
LIST = JsonFormat({"type": "array", "items": {"type": "integer"}})


def test_rows_of_one_prompt_share_their_grammar(spec: ModelSpec) -> None:
    first, second = rows_of(spec, replace(CHAT, format=LIST, n=2))
    assert first.grammar
    assert second.grammar is first.grammar
    assert [row.grammar for row in rows_of(spec, CHAT)] == [None]


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
    assert is_format_required(replace(CHAT, **asked)) == required


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
    [row] = rows_of(spec, replace(CHAT, prompts=(chat,), thinking_budget=asked))
    if budget is None:
        assert row.thinking is None
    else:
        assert row.thinking
        assert row.thinking.budget is not None
        spent = budget - row.thinking.budget
        assert 0 <= spent <= max(0, budget - 1), "what leads out of reasoning counts"
