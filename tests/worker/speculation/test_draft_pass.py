"""Rows that draft get the tokens that they would get one by one, and nothing else changes."""

import random
from pathlib import Path
from typing import Any

import pytest

from mlx_server.engine.messages import LoadModel, Thinking
from mlx_server.requests import SamplingParams
from mlx_server.worker.decode_groups import DecodeBatch
from mlx_server.worker.engine import Engine
from mlx_server.worker.kv_caches import set_kv_bits
from mlx_server.worker.replay_model import ReplayModel
from mlx_server.worker.speculation import ragged_caches
from mlx_server.worker.speculation.gate import Gate
from tests.worker.architectures import CONFIGS
from tests.worker.batch_runs import MIXED, a_prompt
from tests.worker.bench import GREEDY
from tests.worker.constrained_decoding.grammars import ENDS, GRAMMARS
from tests.worker.engine_runs import ask, drain, failures, run, tokens_of
from tests.worker.kinds import KINDS, Kind
from tests.worker.lora_files import network
from tests.worker.speculation.drafted_runs import (
    Always,
    Asked,
    DraftedRun,
    assert_all_equal,
    random_requests,
)

KEPT = {
    **{kind.name: kind for kind in KINDS if kind.name in ("llama", "gpt-oss", "lfm2", "mamba2")},
    "qwen3_5": Kind("qwen3_5", CONFIGS["qwen3_5"]),
}
"""All keys and values, windows, and recurrent states with and without them."""


@pytest.fixture(params=[*KEPT, "llama in 8 bits"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    name, _, bits = request.param.partition(" in ")
    loaded = network(KEPT[name].save(tmp_path / name))
    set_kv_bits(loaded, 8 if bits else None)
    return loaded


@pytest.mark.slow
def test_rows_that_come_and_go_get_the_same_tokens(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged_caches, "SPARE", 8)  # windows drop old columns more often
    dice = random.Random(3)
    asked = random_requests(dice, 300, 14)
    off = DraftedRun(model, asked, None).finish()
    on = DraftedRun(model, asked, off.answers).come_and_go(dice)
    assert_all_equal(off, on)
    sent, held = on.drafted
    assert 0 < held < sent


def test_a_pass_in_which_nobody_drafts_is_launched_before_the_last_one_is_read(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Never(Always):
        def widths(self, drafts: Any, extra: float = 0.0, *, launched: bool = True) -> list[int]:
            return [0] * len(drafts)

    read = []
    monkeypatch.setattr(DecodeBatch, "read", lambda self: read.append(self))
    monkeypatch.setattr("tests.worker.speculation.drafted_runs.Always", Never)
    asked = [
        Asked(a_prompt(length), sampling, 12)
        for length, sampling in zip((5, 40), MIXED, strict=False)
    ]
    off = DraftedRun(tiny_model, asked, None).finish()
    assert DraftedRun(tiny_model, asked, off.answers).finish().answers == off.answers
    assert not read


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "lfm2"])
def test_the_next_turn_after_drafts_is_answered_as_without_a_cache(
    name: str, tmp_path: Path
) -> None:
    """Also if the turn before ended within a draft."""
    loaded = network(KEPT[name].save(tmp_path / name))
    asked = [Asked(a_prompt(40), GREEDY, 30, right=1.0), Asked(a_prompt(70), GREEDY, 30, 0.6)]
    off = DraftedRun(loaded, asked, None).finish()
    for one, answer in zip(asked, off.answers, strict=True):
        one.fields["stop_tokens"] = [answer[17]]
    on = DraftedRun(loaded, asked, off.answers).finish()
    turns = [
        Asked([*one.prompt, *answer, 3, 4, 5], GREEDY, 8)
        for one, answer in zip(asked, on.answers, strict=True)
    ]
    cold = DraftedRun(loaded, turns, None).finish()
    on.asked = [*asked, *turns]
    on.truth = [*off.answers, *cold.answers]
    assert on.finish().answers[2:] == cold.answers
    assert min(on.cached[2], on.cached[3]) > 30


def test_a_loop_within_a_draft_ends_the_row_where_it_does_without() -> None:
    script = [*range(20, 32)] * 80
    how = {"forced_tokens": script, "loops": 2}
    asked = [Asked([1, 2, 3], GREEDY, 900, 1.0, how) for _ in range(4)]
    off = DraftedRun(ReplayModel(64), asked, None).finish()
    on = DraftedRun(ReplayModel(64), asked, [script] * 4).finish()
    assert on.tokens[0][-1].looped == 12
    assert_all_equal(off, on)
    assert on.steps < off.steps / 2


class AllDrafts(Gate):
    """Sends what the drafters find, whatever it costs."""

    is_known = True

    def widths(self, drafts: Any, extra: float = 0.0, *, launched: bool = True) -> list[int]:
        return [len(draft.tokens) if draft else 0 for draft in drafts]

    def most(self, rows: int) -> int:
        return 8


@pytest.mark.slow
def test_rows_with_grammars_and_budgets_get_the_same_tokens(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_server.worker.engine.Gate", AllDrafts)
    thinking = Thinking(5, True, [b"<think>"], [b"</think>"], [40, 41])
    asks = [
        ask(
            row,
            prompt=5 + row,
            tokens=24 + row,
            stop_tokens=ENDS,
            grammar=[*GRAMMARS, None][row % 4],
            thinking=thinking if row % 3 == 0 else None,
            sampling=[
                GREEDY,
                SamplingParams(seed=row),
                SamplingParams(temperature=0.0, logprobs=2),
            ][row % 3],
        )
        for row in range(12)
    ]
    answers = []
    for speculation in (False, True):
        engine = Engine(concurrency=8, clock=lambda: 0.0)  # no mask is slow
        engine.handle(LoadModel("tiny", str(tiny_path), ENDS, speculation=speculation))
        drain(engine)
        reports = run(engine, *asks)
        assert not failures(reports)
        answers.append([tokens_of(each.row, reports) for each in asks])
    off, on = answers
    assert [[(t.id, t.finish) for t in row] for row in on] == [
        [(t.id, t.finish) for t in row] for row in off
    ]
    assert sum(t.drafts[1] for row in on for t in row if t.drafts) > 0
