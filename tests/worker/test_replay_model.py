"""A model without weights says what its script says, in the real batch and the real engine."""

import json
import random
from pathlib import Path

import pytest

from mlx_server.engine.messages import CancelRows, LoadModel, ModelLoaded, Token
from mlx_server.worker.engine import Engine
from mlx_server.worker.replay_model import ReplayModel
from tests.clocks import Clock
from tests.worker.batch_runs import Ask, Run, a_prompt, alone, come_and_go, ids
from tests.worker.engine_runs import ask, drain, of, tokens_of, until

WIDTH = 320
END = 2
HELLO = (72, 101, 108, 108, 111, END)


@pytest.fixture
def model() -> ReplayModel:
    return ReplayModel(WIDTH)


def a_play(dice: random.Random) -> Ask:
    """Some prompts begin alike, some are equal; some scripts end by themselves."""
    beginning = a_prompt(60, seed=dice.randrange(2))[: dice.choice([0, 40, 60])]
    prompt = [*beginning, *a_prompt(dice.choice([1, 2, 7, 30, 200]), seed=dice.randrange(2))]
    script = tuple(dice.randrange(3, WIDTH) for _ in range(dice.randint(1, 25)))
    ending = dice.choice([(), (END,)])
    return Ask(prompt, dice.randint(1, 30), (END,), script=(*script, *ending))


def said(play: Ask) -> list[int]:
    """After the script's end its last token comes again and again."""
    assert play.script
    repeated = [*play.script, *[play.script[-1]] * play.max_tokens][: play.max_tokens]
    return repeated[: repeated.index(END) + 1] if END in repeated else repeated


def test_it_says_its_script_and_ends_with_it(model: ReplayModel) -> None:
    answer = alone(model, Ask(a_prompt(9), 20, (END,), script=HELLO))
    assert ids(answer) == list(HELLO)
    assert [token.finish for token in answer] == [None] * 5 + ["stop"]


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20], ids=["", "cached"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_join_and_leave_and_keep_their_place(
    model: ReplayModel, seed: int, cache_bytes: int
) -> None:
    dice = random.Random(seed)
    plays = [a_play(dice) for _ in range(25)]
    run = Run(model, concurrency=5, piece=48, cache_bytes=cache_bytes)
    cancelled = come_and_go(run, plays, dice)
    assert any(run.cached.values()) == bool(cache_bytes)
    for number, play in enumerate(plays):
        assert ids(run.answers[number]) == said(play)[: cancelled.get(number)]
    run.assert_nothing_is_left()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    config = {"model_type": "replay", "vocab_size": WIDTH}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    return tmp_path


@pytest.fixture
def clock() -> Clock:
    return Clock(tick=1e-6)


@pytest.fixture
def engine(path: Path, clock: Clock) -> Engine:
    engine = Engine(concurrency=4, cache_bytes=1 << 20, clock=clock)
    for model in ("slow", "quick"):
        engine.handle(LoadModel(model, str(path)))
    assert of(ModelLoaded, drain(engine)) == [
        ModelLoaded("slow", WIDTH, 0),
        ModelLoaded("quick", WIDTH, 0),
    ]
    return engine


def until_it_rests(engine: Engine) -> list[Token]:
    """Steps as long as there is something to do now."""
    reports = until(engine, lambda _: engine.pause != 0)
    return tokens_of(0, reports)


def test_it_takes_its_time_and_another_model_does_not_wait(engine: Engine, clock: Clock) -> None:
    script = [5, 6, 7, 8]
    engine.handle(ask(0, model="slow", forced_tokens=script, delay=3600.0, tokens=4))
    assert until_it_rests(engine) == []
    for token in script:
        engine.handle(ask(1, model="quick", forced_tokens=[*range(100, 200)], tokens=100))
        other = until(engine, lambda _: engine.pause != 0)
        assert ids(tokens_of(1, other)) == list(range(100, 200))
        assert tokens_of(0, other) == []
        assert engine.pause
        assert 3500 < engine.pause <= 3600
        clock.now += 3600
        assert ids(until_it_rests(engine)) == [token]
    assert engine.pause is None


def test_the_delay_of_a_row_goes_with_it(engine: Engine, clock: Clock) -> None:
    engine.handle(ask(0, model="slow", forced_tokens=[5], delay=3600.0, tokens=100))
    until_it_rests(engine)
    engine.handle(CancelRows([0]))
    assert engine.pause is None
    engine.handle(ask(1, model="slow", forced_tokens=[6, 7], tokens=2))
    reports = until(engine, lambda reports: len(tokens_of(1, reports)) == 2)
    assert ids(tokens_of(1, reports)) == [6, 7]
