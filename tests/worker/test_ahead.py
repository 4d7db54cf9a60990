"""The beginnings of next prompts are computed while no request waits, and answers stay the same."""

from pathlib import Path

import pytest

from mlx_server.engine.messages import ComputeAhead, ComputedAhead, Unloaded, UnloadModel
from mlx_server.worker.prefill.schedule import LEAST
from tests.worker.bench import TOKENS, Bench
from tests.worker.engine_runs import active_memory
from tests.worker.lora_files import network
from tests.worker.one_pass import expected
from tests.worker.prefill.disk_runs import words

pytestmark = pytest.mark.slow

ROOM = 1 << 30

HISTORY, ANSWER, QUESTION = 150, 200, 30


class Engine(Bench):
    """An engine whose computing ahead can be watched."""

    def __init__(self, path: Path, cache_bytes: int = ROOM) -> None:
        super().__init__(path, cache_bytes)

    def ahead(self, tokens: list[int], **more: object) -> None:
        command = ComputeAhead("m", tokens, **{"most": 4096, **more})  # type: ignore[arg-type]
        self.handle(command)

    @property
    def pieces(self) -> list[int]:
        reports = (report for report in self.reports if isinstance(report, ComputedAhead))
        return [report.computed for report in reports if report.computed]

    @property
    def used(self) -> int:
        return sum(report.used for report in self.reports if isinstance(report, ComputedAhead))


def conversation() -> tuple[list[int], list[int], list[int]]:
    """A prompt, what the next prompt is known to begin with, and the next prompt."""
    history = words(1, HISTORY)
    known = [*history, *words(2, ANSWER)]
    return [*history, *words(3, 4)], known, [*known, *words(4, QUESTION)]


def cold(path: Path, prompt: list[int], answer: list[int]) -> list[int]:
    """What is answered with nothing computed ahead. answer: what the engine says."""
    return expected(network(path), prompt, answer, TOKENS)


def first_turn(engine: Engine) -> None:
    prompt, *_ = conversation()
    engine.answer(prompt, branches=[HISTORY], continued_from=HISTORY)


def test_the_next_prompt_is_computed_but_for_its_new_message(path: Path) -> None:
    engine = Engine(path)
    first_turn(engine)
    _, known, following = conversation()
    engine.ahead(known)
    engine.finish()
    assert sum(engine.pieces) == ANSWER
    assert engine.used == 0
    row = engine.begin(following)
    answer = engine.finish()[row]
    assert engine.cached[row] == len(known)
    assert engine.used == ANSWER
    assert answer == cold(path, following, answer)


def test_a_request_comes_before_the_next_piece(path: Path) -> None:
    engine = Engine(path)
    first_turn(engine)
    _, known, following = conversation()
    engine.ahead(known)
    engine.step()
    (first,) = engine.pieces
    assert LEAST <= first < ANSWER
    stranger, own = engine.begin(words(9, 50)), engine.begin(following)
    answers = engine.finish()
    assert engine.pieces == [first], "the conversation has gone on"
    assert engine.cached[stranger] == 0
    assert engine.cached[own] == HISTORY + first
    assert engine.used == first
    assert answers[own] == cold(path, following, answers[own])
    assert answers[stranger] == cold(path, words(9, 50), answers[stranger])


def test_no_row_waits_for_more_than_the_piece_under_way(llama: Path) -> None:
    engine = Engine(llama)
    for seed in range(3):
        engine.ahead(words(seed, 400))
    engine.step()
    begun = engine.pieces
    row = engine.begin(words(9, 50))
    while row not in engine.step():
        assert engine.pieces == begun
    while row in engine.batch.rows:
        engine.step()
        assert engine.pieces == begun
    engine.finish()
    assert sum(engine.pieces) == 3 * 400


def test_the_tokens_are_bounded(llama: Path) -> None:
    engine = Engine(llama)
    first_turn(engine)
    _, known, following = conversation()
    engine.ahead(known, most=64)
    engine.finish()
    assert sum(engine.pieces) == 64
    row = engine.begin(following)
    answer = engine.finish()[row]
    assert answer == cold(llama, following, answer)
    assert engine.cached[row] == HISTORY + 64


def test_a_conversation_that_grows_keeps_to_the_limit_too(llama: Path) -> None:
    """Its own cache and the cached prompts share the prompt cache's memory at each piece."""
    limit = 1_500_000
    engine = Engine(llama, cache_bytes=limit)
    engine.ahead(words(1, 600))
    engine.finish()
    before = active_memory() - engine.engine.prompts.memory.nbytes
    engine.ahead(words(2, 4000))
    while engine.engine.pause is not None:
        engine.step()
        assert active_memory() - before < 1.1 * limit
    assert engine.engine.prompts.memory.nbytes <= limit
    assert 600 < sum(engine.pieces) < 600 + 4000


@pytest.mark.parametrize("tokens", [[], [1] * 15, [10**30] * 64, [-1] * 64, [320] * 64])
def test_tokens_that_can_not_be_computed_are_left_out(llama: Path, tokens: list[int]) -> None:
    engine = Engine(llama)
    engine.ahead(tokens)
    engine.ahead(words(1, 64), most=0)
    engine.ahead(words(1, 64), adapter="unknown")
    engine.finish()
    assert engine.pieces == []
    assert engine.engine.pause is None
    assert len(engine.answer(words(2, 20))) == 12


def test_a_model_can_be_unloaded_meanwhile(llama: Path) -> None:
    engine = Engine(llama)
    engine.ahead(words(1, 500))
    engine.ahead(words(2, 500))
    engine.step()
    reports = engine.handle(UnloadModel("m"))
    assert any(isinstance(report, Unloaded) for report in reports)
    assert engine.engine.pause is None
    assert engine.engine.prompts.memory.nbytes == 0


def test_an_error_ends_only_the_computing_ahead(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(llama)

    def fails(*_: object) -> int:
        raise ValueError("no")

    with monkeypatch.context() as failing:
        failing.setattr("mlx_server.worker.ahead.using", fails)
        engine.ahead(words(1, 500))
        engine.finish()
    assert engine.engine.pause is None
    assert len(engine.answer(words(2, 20))) == 12
