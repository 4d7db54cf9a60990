"""Rows that draft get the tokens that they would get one by one, and nothing else changes."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.engine.worker_arguments import Mode
from mlx_server.models.vision import can_see
from mlx_server.worker import batch, decode_groups, ragged_caches
from mlx_server.worker.constrained_decoding.mask_threads import YieldingMatcher
from mlx_server.worker.costs import CostCurve, products_of
from mlx_server.worker.decode_groups import DecodeBatch
from mlx_server.worker.kernels import SORTED
from mlx_server.worker.replay_model import ReplayModel
from tests.tiny import TOKENS
from tests.worker.batch_runs import MIXED, a_prompt
from tests.worker.bench import GREEDY
from tests.worker.constrained_decoding.grammars import WORDS
from tests.worker.kinds import KINDS
from tests.worker.lora_files import mlx_adapter, network
from tests.worker.speculation import mixed_requests
from tests.worker.speculation.drafted_runs import (
    CLOSE,
    Always,
    Asked,
    DraftedRun,
    assert_all_equal,
    assert_equal,
    drafted,
)
from tests.worker.speculation.drafting_ranks import RING, ring_outcome
from tests.worker.speculation.mixed_requests import SHARE, Model, drafted_run, seeing_model

KEPT = ("llama", "gpt_oss", "lfm2", "mamba2", "qwen3_5")
"""All keys and values, windows, and recurrent states with and without them."""


def plain(name: str, folder: Path, tokenizer: Path, **how: Any) -> Model:
    return Model(KINDS[name].save(folder / "m"), TOKENS, tokenizer, **how)


def adapted(name: str, folder: Path, tokenizer: Path) -> Model:
    made = plain(name, folder, tokenizer)
    made.adapters["a"] = mlx_adapter(folder / "a", made.path)
    return made


def seeing(family: str, folder: Path, tokenizer: Path) -> Model:
    if not can_see():
        pytest.skip("the extra `vision` is not installed")
    return seeing_model(family, folder, tokenizer)


MODELS: dict[str, Callable[[Path, Path], Model]] = {
    **{name: partial(adapted, name) for name in KEPT},
    "llama in 8 bits": partial(plain, "llama", kv_bits=8),
    **{f"{family} with pictures": partial(seeing, family) for family in ("qwen3_vl", "qwen3_5")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_random_requests_get_the_same_tokens(
    name: str, tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grammars, budgets, adapters, pictures and loops beside each other, which come and go; and
    the next turns of these conversations, from the prompt cache."""
    monkeypatch.setattr(ragged_caches, "SPARE", 8)  # windows drop old columns more often
    run = drafted_run(MODELS[name](tmp_path, tiny_path), seed=3, count=8)
    for off, on in run.pairs:
        assert_equal(off, on)
    sent, held = drafted(chain.from_iterable(run.answers.values()))
    assert 0 < held < sent


def test_a_draft_beyond_the_reasoning_reads_nothing_of_the_grammar_after_it(
    tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHARE, "thinking", 1.0)
    monkeypatch.setitem(SHARE, "grammar", 0.0)
    outcome = drafted_run(plain("llama", tmp_path, tiny_path), seed=0, count=30).outcome
    assert outcome.held
    assert not outcome.differing


def test_drafts_copy_the_matcher_of_a_row_once(
    tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy takes as long as all that the matcher has read."""
    copies = list[YieldingMatcher]()
    copy = YieldingMatcher.copy

    def counted(self: YieldingMatcher) -> YieldingMatcher:
        copies.append(copy(self))
        return copies[-1]

    monkeypatch.setattr(YieldingMatcher, "copy", counted)
    monkeypatch.setitem(SHARE, "grammar", 1.0)
    monkeypatch.setattr(mixed_requests, "GRAMMARS", [WORDS])  # its ending is not searched
    outcome = drafted_run(plain("llama", tmp_path, tiny_path), seed=0, count=8).outcome
    assert outcome.held > outcome.requests >= len(copies) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name"), RING[::2])
def test_ranks_send_the_same_drafts(mode: Mode, name: str, tmp_path: Path, tiny_path: Path) -> None:
    outcome = ring_outcome(mode, name, tmp_path, tiny_path, seed=3, count=8)
    assert outcome.requests == 16
    assert outcome.differing == 0
    assert outcome.distance <= CLOSE
    assert 0 < outcome.held < outcome.sent


def test_a_pass_in_which_nobody_drafts_is_launched_before_the_last_one_is_read(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Never(Always):
        def widths(self, drafts: Any, extra: float = 0.0, *, launched: bool = True) -> list[int]:
            return [0] * len(drafts)

    read = []
    monkeypatch.setattr(batch, "IS_LAUNCHED_AHEAD", True)
    monkeypatch.setattr(DecodeBatch, "read", lambda self: read.append(self))
    monkeypatch.setattr("tests.worker.speculation.drafted_runs.Always", Never)
    asked = [
        Asked(a_prompt(length), sampling, 12)
        for length, sampling in zip((5, 40), MIXED, strict=False)
    ]
    off = DraftedRun(tiny_model, asked, None).finish()
    assert DraftedRun(tiny_model, asked, off.answers).finish().answers == off.answers
    assert not read


def test_a_pass_asks_for_no_more_drafts_once_its_time_is_over(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Asked(a_prompt(length), GREEDY, 12, 1.0) for length in (5, 40)]
    off = DraftedRun(tiny_model, asked, None).finish()
    on = DraftedRun(tiny_model, asked, off.answers).finish()
    monkeypatch.setattr(decode_groups, "DRAFT_SECONDS", 0.0)
    none = DraftedRun(tiny_model, asked, off.answers).finish()
    assert on.answers == none.answers == off.answers
    # first tokens may be told in one step or two
    assert on.steps < off.steps - 1 <= none.steps


@pytest.mark.parametrize("name", KEPT[:4])
def test_the_next_turn_after_drafts_is_answered_as_without_a_cache(
    name: str, tmp_path: Path
) -> None:
    """Also if the turn before ended within a draft; what it computed is used again."""
    loaded = network(KINDS[name].save(tmp_path / name))
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
    assert [on.cached[2], on.cached[3]] == [len(turn.prompt) - 3 for turn in turns]


@pytest.mark.parametrize(("padding", "is_split"), [(0, False), (3, False), (3, True)])
def test_matrices_compute_only_real_positions_and_what_reaches_a_cheaper_kernel(
    padding: int, is_split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows without drafts don't cost as much as the one with the longest; nor do they on a
    rank, whose layers have other classes."""
    loaded = network(KINDS["llama-4bit"].save(tmp_path / "m"))
    whole = products_of(loaded)
    if is_split:
        loaded.shard(mx.distributed.init())
    assert products_of(loaded) == whole
    asked = [Asked(a_prompt(9, n), GREEDY, 20, right=[1.0, None, None][n]) for n in range(3)]
    off = DraftedRun(loaded, asked, None).finish()
    monkeypatch.setattr(CostCurve, "padding", lambda self, rows: padding)
    computed, multiply = list[int](), mx.quantized_matmul

    def recorded(x: mx.array, *rest: Any, **how: Any) -> mx.array:
        computed.append(x.size // x.shape[-1])
        return multiply(x, *rest, **how)

    monkeypatch.setattr(mx, "quantized_matmul", recorded)
    on, passes = DraftedRun(loaded, asked, off.answers), 0
    for number in range(3):
        on.join(number)
    while on.batch:
        computed.clear()
        on.step()
        if (positions := on.batch.decoder.positions) > len(asked):
            assert {*computed} == {positions + padding}
            passes += 1
    assert passes
    assert on.answers == off.answers


@pytest.mark.parametrize("padding", [0, 40])
def test_experts_that_are_read_once_for_all_positions_change_no_token(
    padding: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = network(KINDS["gpt_oss"].save(tmp_path / "m"))
    asked = [Asked(a_prompt(9, n), GREEDY, 20, right=[1.0, 0.7, None][n]) for n in range(3)]
    off = DraftedRun(loaded, asked, None).finish()
    monkeypatch.setattr(CostCurve, "padding", lambda self, rows: padding)
    pairs, multiply = list[int](), mx.gather_mm

    def recorded(x: mx.array, *rest: Any, **how: Any) -> mx.array:
        pairs.append(x.size // x.shape[-1] if how.get("sorted_indices") else 0)
        return multiply(x, *rest, **how)

    monkeypatch.setattr(mx, "gather_mm", recorded)
    assert DraftedRun(loaded, asked, off.answers).finish().answers == off.answers
    assert (max(pairs) >= SORTED) is (padding > 0)


def test_a_loop_within_a_draft_ends_the_row_where_it_does_without() -> None:
    script = [*range(20, 32)] * 80
    how = {"forced_tokens": script, "loops": 2}
    asked = [Asked([1, 2, 3], GREEDY, 900, 1.0, how) for _ in range(4)]
    off = DraftedRun(ReplayModel(64), asked, None).finish()
    on = DraftedRun(ReplayModel(64), asked, [script] * 4).finish()
    assert on.tokens[0][-1].looped == 12
    assert_all_equal(off, on)
    assert on.steps < off.steps / 2
