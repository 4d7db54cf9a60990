"""Rows that follow a grammar, next to rows that follow none."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
import tokenizers

from mlx_server.engine.messages import (
    CancelRows,
    Generate,
    LoadModel,
    Report,
    Thinking,
    Token,
    UnloadModel,
)
from mlx_server.requests import SamplingParams
from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary
from mlx_server.worker.engine import Engine
from tests.tables import cases
from tests.worker.batch_runs import MIXED, ids
from tests.worker.constrained_decoding.grammars import (
    DIGITS,
    ENDS,
    GRAMMARS,
    JSON,
    SCHEMA,
    WORDS,
    loaded,
)
from tests.worker.engine_runs import ask, drain, failures, run, tokens_of


@pytest.fixture(scope="module")
def text_of(tiny_path: Path) -> Any:
    made = tokenizers.Tokenizer.from_file(str(tiny_path / "tokenizer.json"))
    return lambda row, reports: made.decode(ids(tokens_of(row, reports)))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", MIXED)
def test_no_masked_token_ever_wins(engine: Engine, text_of: Any, sampling: SamplingParams) -> None:
    asks = [
        ask(row, grammar=each, tokens=60, stop_tokens=ENDS, sampling=sampling)
        for row, each in enumerate(GRAMMARS)
    ]
    reports = run(engine, *asks)
    assert not failures(reports)
    assert re.fullmatch("[0-9]{3,9}", text_of(0, reports))
    assert re.fullmatch("[a-z ,.]*", text_of(1, reports))
    if tokens_of(2, reports)[-1].finish == "stop":
        jsonschema.validate(json.loads(text_of(2, reports)), SCHEMA)


FAR_OUT = [
    SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(320), -100.0) | {5: 100.0}),
    SamplingParams(seed=1, logit_bias=dict.fromkeys(range(320), -3e38), frequency_penalty=3e38),
    SamplingParams(seed=1, logit_bias=dict.fromkeys(range(320), 3e38), repetition_penalty=1e38),
    SamplingParams(seed=1, min_p=1.0, top_k=1, temperature=5.0),
    SamplingParams(seed=1, top_k=300, top_p=0.999999, temperature=100.0, min_p=1e-9),
    SamplingParams(seed=1, top_p=1e-9, presence_penalty=-3e38),
    SamplingParams(temperature=1e-5, seed=3, logit_bias=dict.fromkeys(range(320), -3e38)),
]


@pytest.mark.parametrize("sampling", FAR_OUT)
def test_nor_where_what_is_allowed_was_pushed_far_away(
    engine: Engine, text_of: Any, sampling: SamplingParams
) -> None:
    reports = run(engine, ask(0, grammar=DIGITS, tokens=20, stop_tokens=ENDS, sampling=sampling))
    assert not failures(reports)
    assert re.fullmatch("[0-9]{3,9}", text_of(0, reports))
    assert tokens_of(0, reports)[-1].finish == "stop"


def test_reported_log_probabilities_are_the_model_s_own(engine: Engine) -> None:
    reported = SamplingParams(temperature=0, logprobs=2)
    reports = run(engine, ask(0, sampling=reported), ask(1, grammar=DIGITS, sampling=reported))
    free, constrained = tokens_of(0, reports)[0], tokens_of(1, reports)[0]
    assert constrained.id != free.id
    assert free.logprobs
    assert constrained.logprobs
    assert dict(constrained.logprobs.top) == pytest.approx(dict(free.logprobs.top), abs=1e-3)
    assert constrained.logprobs.chosen
    assert constrained.logprobs.chosen < constrained.logprobs.top[0][1]


def test_models_of_one_checkpoint_share_its_vocabulary_until_it_is_replaced(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, built = Vocabulary.build, list[Vocabulary]()

    def counted(vocabulary: Vocabulary) -> Vocabulary:
        built.append(vocabulary)
        return build(vocabulary)

    def load(model: str) -> None:
        engine.handle(LoadModel(model, str(folder), ENDS))
        drain(engine)

    def answers(row: int, model: str) -> bool:
        asked = ask(row, model=model, grammar=DIGITS, tokens=20, stop_tokens=ENDS)
        return not failures(run(engine, asked))

    monkeypatch.setattr(Vocabulary, "build", counted)
    folder, engine = shutil.copytree(tiny_path, tmp_path / "model"), Engine()
    load("a")
    load("b")
    assert answers(0, "a")
    assert answers(1, "b")
    engine.handle(UnloadModel("a"))
    assert answers(2, "b")
    assert len(built) == 1
    (folder / "tokenizer.json").touch()
    load("c")
    assert answers(3, "c")
    assert len(built) == 2


@pytest.mark.slow
def test_constrained_and_free_rows_come_and_go_and_answer_as_alone(tiny_path: Path) -> None:
    dice = random.Random(0)
    asks = [_any_row(dice, row) for row in range(24)]
    mixed, apart = loaded(tiny_path, concurrency=5), loaded(tiny_path)
    reports: list[Report] = []
    cancelled: dict[int, int] = {}
    coming = list(asks)
    while coming or mixed.pause is not None:
        while coming and dice.random() < 0.3:
            reports += mixed.handle(coming.pop(0))
        if dice.random() < 0.03:
            victim = dice.randrange(len(asks))
            reports += mixed.handle(CancelRows([victim]))
            cancelled[victim] = len(tokens_of(victim, reports))
        reports += mixed.step()
    assert cancelled
    assert not failures(reports)
    for asked in asks:
        alone = tokens_of(asked.row, run(apart, asked))
        until = cancelled.get(asked.row)
        if until is None or asked in coming:
            assert ids(tokens_of(asked.row, reports)) == ids(alone)
        else:
            assert ids(tokens_of(asked.row, reports))[:until] == ids(alone)[:until]


def _any_row(dice: random.Random, row: int) -> Generate:
    thinking = Thinking(dice.randrange(9), True, [b"\xff[0]"], [b"\xff[1]"], [40 + row, 1])
    return ask(
        row,
        prompt=dice.choice([1, 5, 40]),
        tokens=dice.randint(1, 40),
        stop_tokens=dice.choice([[], ENDS]),
        sampling=dice.choice(MIXED[:-1]) if dice.random() < 0.5 else SamplingParams(seed=row),
        grammar=dice.choice([None, None, *GRAMMARS]),
        thinking=dice.choice([None, None, thinking]),
        prompt_logprobs=dice.random() < 0.2,
    )


def test_a_model_that_rules_out_all_that_is_allowed_ends_its_row_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = type(engine._batches["tiny"].model)
    computed = network.__call__

    def no_digits(self: Any, *args: Any, **rest: Any) -> mx.array:
        logits = computed(self, *args, **rest)
        return mx.where(mx.array(digits), -mx.inf, logits)

    texts = engine._constraints._vocabularies["tiny"].result(60).text
    digits = np.zeros(320, np.bool_)
    digits[: len(texts)] = [text.isdigit() for text in texts]
    monkeypatch.setattr(network, "__call__", no_digits)
    reports = run(engine, ask(0, grammar=DIGITS), ask(1, grammar=WORDS), ask(2))
    assert {*failures(reports)} == {0}
    assert not tokens_of(0, reports)
    assert len(tokens_of(1, reports)) == len(tokens_of(2, reports)) == 5


@pytest.fixture(scope="module")
def demo_tokenizer(demo_path: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(demo_path / "tokenizer.json"))


@pytest.fixture(scope="module")
def player(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A replay model with the demo model's tokens."""
    folder = tmp_path_factory.mktemp("player")
    (folder / "config.json").write_text('{"model_type": "replay", "vocab_size": 49152}')
    (folder / "tokenizer.json").symlink_to(demo_path / "tokenizer.json")
    return loaded(folder, [2, 0])


@pytest.mark.slow
@cases
def test_a_replay_model_says_what_its_grammar_lets_it(
    player: Engine, demo_tokenizer: tokenizers.Tokenizer, script: str, said: str | None
) -> None:
    tokens = [*demo_tokenizer.encode(script).ids, 2]
    asked = ask(0, tokens=60, grammar=JSON, forced_tokens=tokens, stop_tokens=[2, 0])
    reports = run(player, asked)
    assert not failures(reports)
    answer: list[Token] = tokens_of(0, reports)
    assert demo_tokenizer.decode(ids(answer)).startswith(said or script)
    if said is None or said == script:
        assert ids(answer) == tokens
