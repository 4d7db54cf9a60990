"""Reasoning ends with its budget: neither a token sooner nor one later."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlx_server.engine.messages import Generate, Grammar, LoadModel, Report, Thinking, Token
from mlx_server.requests import SamplingParams
from mlx_server.worker.constrained_decoding.logit_constraints import (
    ThinkingBudget,
    end_reasoning_early,
)
from mlx_server.worker.engine import Engine
from tests.tiny import ENDOFTEXT, IM_END, IM_START
from tests.worker.batch_runs import a_prompt, ids
from tests.worker.engine_runs import drain, failures, grammar_of, run, tokens_of

TEXT = [b"\xff[0]", b"\xff[1]", b"<", b"think", b">", b"</", b"a", b"x</think><think>b", b""]
OPEN, CLOSE, LT, THINK, GT, SLASH, A, WILD, SILENT = range(len(TEXT))
OPENS, CLOSES = [b"<think>", b"\xff[0]"], [b"</think>", b"\xff[1]"]


def until_used_up(budget: ThinkingBudget, tokens: Iterable[int]) -> int | None:
    """How many of these tokens it takes."""
    for count, token in enumerate(tokens):
        if budget.used_up:
            return count
        budget.advance(token)
    return None


def test_a_mark_may_begin_a_longer_one() -> None:
    text = [b"<c>", b"thou", b"ght", b"\n", b"\na", b"hm"]
    opens = [b"<c>thought\n", b"<c>"]
    for said, taken in [
        ([0, 1, 2, 3, 5, 5, 5], 6),
        ([0, 1, 2, 4, 5, 5, 5], 5),
        ([0, 5, 5, 5], 3),
        ([0, 1, 5, 5], 3),
        ([0, 1, 2, 5, 5], 4),  # more than two, since the count is not certain
    ]:
        counted = ThinkingBudget(Thinking(2, False, opens, [b"</c>"], []), text)
        assert until_used_up(counted, said) == taken


def test_marks_that_text_spells_are_not_control_tokens() -> None:
    text = [*TEXT, b"\xfe[1]"]
    spelled = ThinkingBudget(Thinking(2, True, OPENS, CLOSES, [A]), text)
    assert until_used_up(spelled, [len(TEXT), A, A]) == 2


STOP = 99


@pytest.mark.parametrize(
    ("script", "end", "said"),
    [
        ([A, A, CLOSE, LT, STOP], [CLOSE], [A, A, CLOSE, LT, STOP]),
        ([A, A, A, CLOSE, LT, STOP], [CLOSE], [A, A, CLOSE, LT, STOP]),
        ([A, A, A, SLASH, THINK, GT, LT, STOP], [CLOSE, A], [A, A, CLOSE, A, LT, STOP]),
        (
            [A, A, A, A, CLOSE, OPEN, GT, LT, STOP],
            [CLOSE, OPEN, GT],
            [A, A, CLOSE, OPEN, GT, LT, STOP],
        ),
        ([A, A, A, A, STOP], [CLOSE], [A, A, CLOSE, STOP]),
        ([A, STOP], [CLOSE], [A, STOP]),
    ],
)
def test_a_script_goes_on_behind_its_reasoning(
    script: list[int], end: list[int], said: list[int]
) -> None:
    asked = Thinking(2, True, OPENS, CLOSES, end)
    assert end_reasoning_early(script, asked, TEXT) == said


END = [IM_START, ENDOFTEXT + 3 + 10, 77]


@pytest.fixture(params=["tiny", "replay"])
def engine(request: pytest.FixtureRequest, tiny_path: Path, tmp_path: Path) -> Engine:
    path = tiny_path
    if request.param == "replay":
        path = tmp_path
        (path / "config.json").write_text('{"model_type": "replay", "vocab_size": 320}')
        (path / "tokenizer.json").write_text((tiny_path / "tokenizer.json").read_text())
    made = Engine(concurrency=4)
    made.handle(LoadModel("m", str(path), [IM_END]))
    drain(made)
    return made


def ask(
    engine: Engine,
    row: int,
    thinking: Thinking,
    tokens: int = 40,
    grammar: str | None = None,
    **rest: Any,
) -> Generate:
    script = [30 + i for i in range(60)] if engine._batches["m"].plays else None
    fields: dict[str, Any] = {"stop_tokens": [], "sampling": SamplingParams(temperature=0), **rest}
    prompt = a_prompt(6, seed=row)
    fields["grammar"] = grammar_of(grammar)
    return Generate(
        row, "m", prompt, max_tokens=tokens, forced_tokens=script, thinking=thinking, **fields
    )


def answer(engine: Engine, asked: Generate) -> tuple[list[Token], list[Report]]:
    reports = run(engine, asked)
    return tokens_of(asked.row, reports), reports


def reasoning(budget: int, end: list[int] = END) -> Thinking:
    """Which no model of these tests ends by itself."""
    return Thinking(budget, True, [b"\xff[0]"], [b"\xff[1]"], end)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0, 7])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.3, seed=4, top_p=0.3, min_p=0.4, logprobs=2),
        SamplingParams(temperature=0, logit_bias={77: 3e38}, frequency_penalty=3e38),
    ],
    ids=["drawn", "far out"],
)
def test_the_end_comes_behind_the_last_token(
    engine: Engine, budget: int, sampling: SamplingParams
) -> None:
    free, _ = answer(engine, ask(engine, 1, reasoning(10**6), sampling=sampling))
    ended, _ = answer(engine, ask(engine, 1, reasoning(budget), sampling=sampling))
    assert len(free) == len(ended) == 40
    assert ids(ended)[:budget] == ids(free)[:budget]
    assert ids(ended)[budget:][:3] == END[: max(0, 40 - budget)]
    assert all(bool(token.logprobs) == (sampling.logprobs is not None) for token in ended)


@pytest.mark.slow
def test_a_stop_token_within_is_as_ever(engine: Engine) -> None:
    free, _ = answer(engine, ask(engine, 1, reasoning(10**6)))
    stop = free[4].id
    stopped, _ = answer(engine, ask(engine, 1, reasoning(30), stop_tokens=[stop]))
    assert ids(stopped) == ids(free)[: ids(free).index(stop) + 1]
    assert stopped[-1].finish == "stop"
    assert answer(engine, ask(engine, 1, reasoning(30)))[0][33:]  # the engine goes on


@pytest.mark.slow
def test_rows_end_their_reasoning_each_for_itself(engine: Engine) -> None:
    asks = [ask(engine, row, reasoning(row * 3), tokens=30 + row) for row in range(4)]
    alone = [ids(answer(engine, each)[0]) for each in asks]
    together = run(engine, *asks)
    assert [ids(tokens_of(row, together)) for row in range(4)] == alone


@pytest.mark.slow
def test_the_grammar_wins(engine: Engine) -> None:
    """It takes six more letters before reasoning may end."""
    letter = 3 + 70
    grammar = f"start: /(?s:.{{9}})/ <[{END[0]}]> /(?s:.*)/\n"
    only = dict.fromkeys(range(128, 320), -100.0)  # letters of one byte each
    sampling = SamplingParams(temperature=0, logit_bias=only | {letter: 90.0})
    end = [END[0], letter, letter]
    asked = ask(engine, 1, reasoning(3, end), grammar=grammar, sampling=sampling, tokens=400)
    tokens, reports = answer(engine, asked)
    assert not failures(reports)
    assert ids(tokens)[:20] == [letter] * 9 + end + [letter] * 8


@pytest.mark.parametrize("engine", ["tiny"], indirect=True)
@pytest.mark.parametrize(
    ("grammar", "before"),
    [(None, 1), (f"start: <[{IM_START}]> /(?s:.*)/\n", 1), (f"start: <[{IM_START}]>\n", 0)],
    ids=["free", "text", "nothing else"],
)
def test_an_answer_begins_where_reasoning_was_ended(
    engine: Engine, grammar: str | None, before: int
) -> None:
    """Tokens before the row's end, which it would say at once."""
    sampling = SamplingParams(temperature=0, logit_bias={IM_END: 90.0})
    thinking = reasoning(0, [IM_START])
    asked = ask(
        engine, 1, thinking, grammar=grammar, sampling=sampling, stop_tokens=[IM_END, 100_000]
    )
    tokens, reports = answer(engine, asked)
    assert not failures(reports)
    assert ids(tokens)[0] == IM_START
    assert ids(tokens).index(IM_END) == 1 + before
    assert tokens[-1].finish == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["tiny"], indirect=True)
@pytest.mark.parametrize("grammar", [None, "start: /(?s:.*)/ <[1]> /(?s:.*)/\n"])
def test_another_grammar_may_hold_from_there_on(engine: Engine, grammar: str | None) -> None:
    letter, x, end = 3 + 70, 3 + ord("x") - ord("!"), [1]
    thinking = msgspec.structs.replace(reasoning(2, end), rest=Grammar("start: /x+/\n"))
    sampling = SamplingParams(temperature=0, logit_bias={letter: 90.0})
    asked = ask(engine, 1, thinking, grammar=grammar, sampling=sampling, stop_tokens=[IM_END])
    tokens, reports = answer(engine, asked)
    assert not failures(reports)
    assert ids(tokens)[:3] == [letter, letter, *end]
    assert set(ids(tokens)[3:]) <= {x, IM_END}
    assert x in ids(tokens)


HARM = [
    Thinking(-1, True, [b"a"], [b"b"], [1]),
    Thinking(1, True, [b""], [b"b"], [1]),
    Thinking(1, True, [b"a"], [b"b" * 1000], [1]),
    Thinking(1, True, [b"a"] * 1000, [b"b"], [1]),
    Thinking(1, True, [b"a"], [b"b"], []),
    Thinking(1, True, [b"a"], [b"b"], [1] * 1000),
    Thinking(1, True, [b"a"], [b"b"], [320]),
    Thinking(1, True, [b"a"], [b"b"], [-1]),
]


@pytest.mark.parametrize("thinking", HARM)
def test_what_could_harm_other_rows_is_not_begun(engine: Engine, thinking: Thinking) -> None:
    assert {*failures(run(engine, ask(engine, 1, thinking)))} == {1}
