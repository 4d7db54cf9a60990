"""Rows that share a batch: what one of them gets is what it would get alone."""

import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.worker import batch
from mlx_server.worker.costs import StepCosts
from mlx_server.worker.prefill.schedule import PrefillBudget
from tests.calls import calls_of
from tests.worker.batch_runs import (
    GREEDY,
    LENGTHS,
    MIXED,
    PIECE,
    Ask,
    Run,
    a_prompt,
    alone,
    come_and_go,
    computed,
    ids,
    together,
)


@pytest.fixture(params=[False, True], ids=["", "launched ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether passes are launched before the tokens of the last one are told, as on a GPU."""
    monkeypatch.setattr(batch, "IS_LAUNCHED_AHEAD", request.param)
    return bool(request.param)


@pytest.mark.slow
@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("concurrency", [16, 3], ids=["all at once", "in turns"])
@pytest.mark.parametrize("mixed", [False, True], ids=["greedy", "mixed"])
def test_together_as_alone(tiny_model: Any, concurrency: int, mixed: bool) -> None:
    params = MIXED if mixed else [GREEDY] * len(LENGTHS)
    asks = [
        Ask(a_prompt(length, seed=2), 5 + 3 * i, sampling=params[i])
        for i, length in enumerate(LENGTHS)
    ]
    answers = together(tiny_model, asks, concurrency=concurrency)
    for ask, answer in zip(asks, answers, strict=True):
        expected = alone(tiny_model, ask)
        assert ids(answer) == ids(expected)
        for token, wanted in zip(answer, expected, strict=True):
            assert (token.logprobs is None) == (wanted.logprobs is None)
            if token.logprobs and wanted.logprobs:
                assert token.logprobs.chosen == pytest.approx(wanted.logprobs.chosen, abs=1e-3)
                assert len(token.logprobs.top) == ask.sampling.logprobs


def test_a_row_that_is_alone_is_computed_without_an_array_for_its_mask(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metal's kernels skip what `causal` hides, and read an array for each head."""
    masks, attention = list[str](), mx.fast.scaled_dot_product_attention

    def recorded(*arguments: Any, mask: Any = None, **named: Any) -> Any:
        masks.append(mask if isinstance(mask, str) else type(mask).__name__)
        return attention(*arguments, mask=mask, **named)

    run = Run(tiny_model)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", recorded)
    run.join(0, Ask(a_prompt(PIECE + 20), 5))
    run.finish()
    assert {*masks} == {"causal", "NoneType"}
    run.join(1, Ask(a_prompt(PIECE + 20), 5))
    run.join(2, Ask(a_prompt(9), 5))
    run.finish()
    assert "array" in masks
    assert ids(run.answers[1]) == ids(run.answers[0])


def test_the_last_piece_of_a_prompt_gives_the_first_token(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """No pass reads all weights for a prompt's last token alone, and the head computes no other."""
    network = type(tiny_model)
    compute, passes = network.__call__, list[tuple[int, int, int]]()

    def recorded(self: Any, inputs: mx.array, *rest: Any, **named: Any) -> Any:
        logits = compute(self, inputs, *rest, **named)
        passes.append((*inputs.shape, logits.shape[1]))
        return logits

    run = Run(tiny_model)
    monkeypatch.setattr(PrefillBudget, "ends", lambda *_: True)  # as where a step takes long
    monkeypatch.setattr(network, "__call__", recorded)
    for number, length in enumerate((3 * PIECE, 30)):
        run.join(number, Ask(a_prompt(length), 5))
    told = [run.batch.step() for _ in range(12)]
    pieces = [(tokens, logits) for _, tokens, logits in passes if tokens > 1]
    assert sum(tokens for tokens, _ in pieces) == 3 * PIECE + 30
    assert len(pieces) > [logits for _, logits in pieces].count(1) == 2
    assert any(done.progress and done.tokens for done in told) is not ahead
    monkeypatch.setattr(StepCosts, "is_alike", False)  # ranks with other layers would not agree
    run = Run(tiny_model)
    passes.clear()
    run.join(0, Ask(a_prompt(3 * PIECE), 5))
    run.until_decoding()
    assert sum(tokens for _, tokens, _ in passes if tokens > 1) == 3 * PIECE - 1


def a_random_ask(dice: random.Random) -> Ask:
    """Many begin alike, some are equal."""
    beginning = a_prompt(PIECE, seed=dice.randrange(2))[: dice.choice([0, 20, 40, PIECE])]
    length = dice.choice([1, 2, 5, 30, PIECE + dice.randrange(60)])
    params = replace(dice.choice(MIXED), seed=dice.randrange(2**32))
    return Ask(
        [*beginning, *a_prompt(length, seed=dice.randrange(3))],
        max_tokens=dice.randint(1, 25),
        stop_tokens=tuple(dice.sample(range(320), 12)),
        sampling=params,
        client=dice.choice("aaab"),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("cache_bytes", [0, 1 << 30], ids=["", "cached"])
@pytest.mark.parametrize("concurrency", [16, 2])
def test_rows_come_and_go(tiny_model: Any, concurrency: int, cache_bytes: int) -> None:
    dice = random.Random(concurrency)
    asks = [a_random_ask(dice) for _ in range(14)]
    run = Run(tiny_model, concurrency=concurrency, piece=48, cache_bytes=cache_bytes)
    cancelled = come_and_go(run, asks, dice)
    assert any(run.cached.values()) == bool(cache_bytes)
    for number, ask in enumerate(asks):
        expected = alone(tiny_model, ask)[: cancelled.get(number)]
        assert ids(run.answers[number]) == ids(expected)
        assert [t.finish for t in run.answers[number]] == [t.finish for t in expected]
    run.assert_nothing_is_left()


@pytest.mark.parametrize("stage", ["waiting", "prefill", "decode"])
def test_a_cancelled_row_is_gone_and_its_neighbours_go_on(tiny_model: Any, stage: str) -> None:
    neighbours = [Ask(a_prompt(20), 30), Ask(a_prompt(7), 25, sampling=MIXED[2])]
    run = Run(tiny_model, concurrency=2 if stage == "waiting" else 3)
    for number, ask in enumerate(neighbours):
        run.join(number, ask)
    run.until_decoding()
    run.step()
    run.join(2, Ask(a_prompt(3 * PIECE), max_tokens=1000))
    run.step()
    while stage == "decode" and not run.answers[2]:
        run.step()
    assert run.stages == {"waiting": (1, 0, 2), "prefill": (0, 1, 2), "decode": (0, 0, 3)}[stage]

    given = len(run.answers[2])
    run.batch.cancel(2)
    assert run.stages == (0, 0, 2)
    assert sorted(run.batch.rows) == [0, 1]
    run.finish()
    assert len(run.answers[2]) == given
    assert [ids(run.answers[n]) for n in (0, 1)] == [ids(alone(tiny_model, a)) for a in neighbours]
    run.assert_nothing_is_left()


def test_a_prompt_that_is_set_aside_goes_on_where_it_was(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For another client's, for a shorter one of its own client; and each may be cancelled."""
    long = Ask(a_prompt(5 * PIECE), 6, client="greedy")
    rival = Ask(a_prompt(5 * PIECE, seed=1), 6, client="greedy")
    newcomer = Ask(a_prompt(2 * PIECE + 9), 6, client="newcomer")
    shorter = Ask(a_prompt(40), 6, client="greedy")
    expected = [ids(alone(tiny_model, ask)) for ask in (long, rival, newcomer, shorter)]
    pieces = computed(monkeypatch)
    for cancelled in (None, 0, 2):
        pieces.clear()
        run = Run(tiny_model)
        for number, ask in enumerate([long, rival]):
            run.join(number, ask)
        run.step()
        run.join(2, newcomer)
        run.step()
        assert run.stages == (2, 1, 0)
        run.join(3, shorter)
        if cancelled is not None:
            run.batch.cancel(cancelled)
        run.finish()
        assert [ids(run.answers[n]) for n in range(4)] == [
            [] if n == cancelled else answer for n, answer in enumerate(expected)
        ]
        assert list(run.progress) == [0, 2, 3, 1] if cancelled is None else True
        run.assert_nothing_is_left()
        if cancelled is None:
            assert sum(map(sum, pieces)) == sum(len(a.prompt) - 1 for a in (long, rival)) + sum(
                len(a.prompt) - 1 for a in (newcomer, shorter)
            )


def test_a_row_ends_with_its_stop_token_and_says_so(tiny_model: Any) -> None:
    free = ids(alone(tiny_model, Ask(a_prompt(6), 10)))
    fifth = free[4]
    assert fifth not in free[:4]
    asks = [
        Ask(a_prompt(6), 10, stop_tokens=(fifth, 319)),
        Ask(a_prompt(6), 10),
        Ask(a_prompt(6), 5, stop_tokens=(fifth,)),  # also its last token: the model did end
    ]
    stopped, unstopped, both = together(tiny_model, asks)
    assert [(t.id, t.finish) for t in stopped] == [*((t, None) for t in free[:4]), (fifth, "stop")]
    assert ids(unstopped) == free
    assert (both[-1].id, both[-1].finish) == (fifth, "stop")


def test_prompts_of_one_length_are_prefilled_in_the_order_they_came(tiny_model: Any) -> None:
    """Each row has its first token before the next one's prompt is done; a shorter one is first."""
    long = [Ask(a_prompt(200, seed=n), 1000) for n in range(6)]
    run = Run(tiny_model, piece=64)
    for number, ask in enumerate([*long, Ask(a_prompt(3))]):
        run.join(number, ask)
    order: list[int] = []
    while len(order) < 7:
        for token in run.step().tokens:
            if token.row not in order:
                order.append(token.row)
                assert run.batch.waiting == 7 - len(order)
    assert order == [6, 0, 1, 2, 3, 4, 5]


def test_what_an_answer_leaves_is_known_to_the_next_turn(tiny_model: Any) -> None:
    """Of a finished answer and of one that was cancelled: every token that was computed."""
    run = Run(tiny_model, cache_bytes=1 << 30)
    for number, cancelled in [(0, False), (1, True)]:
        prompt = a_prompt(40, seed=number)
        run.join(number, Ask(prompt, 1000 if cancelled else 12))
        while len(run.answers[number]) < 12:
            run.step()
        run.batch.cancel(number)
        turn = Ask([*prompt, *ids(run.answers[number]), 7, 8, 9])
        run.join(number + 10, turn)
        run.finish()
        assert run.cached[number + 10] == 52
        assert ids(run.answers[number + 10]) == ids(alone(tiny_model, turn))


def test_tokens_are_told_before_the_next_piece_is_computed(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tiny_model)
    run.join(0, Ask(a_prompt(5), 100))
    run.until_decoding()
    run.join(1, Ask(a_prompt(300)))
    pieces = computed(monkeypatch)
    assert [*run.answers[0], *run.batch.step().tokens]
    assert not pieces
    assert not run.batch.step().tokens
    assert pieces == [[PIECE]]


@pytest.mark.parametrize("client", ["greedy", "127.0.0.1 {n}"])
def test_a_row_that_decodes_gives_its_place_and_gets_it_back(tiny_model: Any, client: str) -> None:
    """Its client or address has several, and the newcomer none. Nobody's answer changes."""
    clients = [client.format(n=n) for n in range(4)]
    asks = [
        Ask(a_prompt(9, seed=n), 30, sampling=MIXED[n], client=client)
        for n, client in enumerate(clients)
    ]
    newcomer = Ask(a_prompt(9, seed=9), 5, sampling=MIXED[4], client="newcomer")
    run = Run(tiny_model, concurrency=3)
    for number, ask in enumerate(asks):
        run.join(number, ask)
    while run.stages[2] < 3:
        run.step()
    run.join(4, newcomer)
    while not run.answers[4]:
        run.step()
        assert sum(run.stages[1:]) <= 3
    assert len(run.batch.aside) == 1
    assert not run.answers[3]
    run.finish()
    expected = [ids(alone(tiny_model, ask)) for ask in [*asks, newcomer]]
    assert [ids(answer) for answer in run.answers.values()] == expected
    run.assert_nothing_is_left()


def test_no_more_rows_are_taken_than_may_run_together(tiny_model: Any) -> None:
    """Rows in prefill count too: each holds a cache."""
    dice = random.Random(5)
    run = Run(tiny_model, concurrency=3)
    for number in range(12):
        run.join(number, Ask(a_prompt(dice.randint(1, 2 * PIECE)), dice.randint(1, 20)))
    most = 0
    while run.batch:
        run.step()
        waiting, prefill, decode = run.stages
        assert waiting + prefill == run.batch.waiting
        most = max(most, prefill + decode)
    assert most == 3


@pytest.mark.parametrize("clients", [1, 40])
def test_prompts_that_wait_take_little_of_each_step(tiny_model: Any, clients: int) -> None:
    """No row that decodes gives its place to them."""
    run = Run(tiny_model, concurrency=8)
    for number in range(8):
        run.join(number, Ask(a_prompt(9, seed=number), 1000, client=f"c{number % clients}"))
    run.until_decoding()
    steps = [calls_of(run.batch.step) for _ in range(3)]
    for number in range(8, 48):
        run.join(number, Ask(a_prompt(9, seed=number), client=f"c{number % clients}"))
    run.step()
    more = min(calls_of(run.batch.step) for _ in range(3)) - min(steps)
    assert run.stages == (40, 0, 8)
    assert more <= 40 * 70
