"""Deterministic rows: the same bits alone, next to rows that draft, after preemptions and from any
cache."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_server.engine.messages import (
    Generate,
    LoadAdapter,
    PreemptRows,
    PromptLogprobs,
    ResumeRows,
    Token,
)
from mlx_server.prompt_files import PromptFolder
from mlx_server.requests import SamplingParams
from mlx_server.worker import batch
from mlx_server.worker.decode_groups import DecodeBatch, PrefillBatch
from mlx_server.worker.mlx_lm_internals import BatchKVCache
from tests.worker.batch_runs import a_prompt
from tests.worker.bench import Bench
from tests.worker.engine_runs import of, tokens_of
from tests.worker.lora_files import mlx_adapter
from tests.worker.speculation.mixed_requests import any_draft_is_sent

PIECE = 32
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=3, logprobs=3, frequency_penalty=0.1)
FAMILIES = ("llama-4bit", "gpt_oss", "mamba2", "lfm2", "qwen3_5")
"""Dense and quantised, experts and sliding windows, recurrent states, convolutions, linear
attention."""

BEGINNING = a_prompt(3 * PIECE, seed=1)
PROMPTS = [
    a_prompt(5),
    BEGINNING[: PIECE + 1],
    BEGINNING,
    [*BEGINNING, *a_prompt(PIECE + 9, seed=2)],
    [*BEGINNING[: 2 * PIECE + 7], *a_prompt(PIECE, seed=3)],
]
"""Some begin alike, within a piece and at its end."""


@pytest.fixture(scope="module", autouse=True)
def _short_pieces_and_drafts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched, any_draft_is_sent():
        for name in ("FIXED_PIECE", "EXPERTS_PIECE"):
            patched.setattr(batch, name, PIECE)
        yield


@pytest.fixture(scope="module")
def model(made: Callable[[str], Path]) -> Path:
    """Not quantised: on a CPU, then, most shapes show in the bits."""
    return made("gpt_oss")


def asked(number: int, prompt: Sequence[int], *, tokens: int = 5, **fields: Any) -> Generate:
    fields = {"deterministic": True, **fields}
    return Generate(number, "m", list(prompt), tokens, [], DRAWN, **fields)


def alone(path: Path, asks: Sequence[Generate], adapter: Path | None = None) -> list[list[Token]]:
    """What each is answered while nothing else is done, and nothing is cached."""
    bench = Bench(path)
    if adapter:
        bench.handle(LoadAdapter("m", "digest", str(adapter)))
    for each in asks:
        bench.handle(each)
        bench.finish()
    return answers(bench, asks)


def answers(bench: Bench, asks: Sequence[Generate]) -> list[list[Token]]:
    """With each token's log probability and those of its alternatives."""
    tokens = [tokens_of(each.row, bench.reports) for each in asks]
    return [[Token(0, t.id, t.finish, t.logprobs) for t in row] for row in tokens]


def in_company(bench: Bench, asks: Sequence[Generate], dice: random.Random) -> None:
    """They come at random, and some are preempted for a while, at any place."""
    waiting, preempted = list(asks), set[int]()
    left = {each.row: each.max_tokens for each in asks}
    while any(left.values()):
        if waiting and dice.random() < 0.5:
            bench.handle(waiting.pop(0))
        rows = [number for number in bench.batch.rows if number not in preempted]
        if rows and dice.random() < 0.1:
            preempted.add(number := dice.choice(rows))
            bench.handle(PreemptRows([number]))
        elif preempted and dice.random() < 0.5:
            bench.handle(ResumeRows([preempted.pop()]))
        for number, tokens in bench.step().items():
            left[number] -= len(tokens)
        assert not bench.failed


def others(dice: random.Random, **fields: Any) -> list[Generate]:
    """Rows that are not deterministic."""
    prompts = [PROMPTS[3], BEGINNING[: 2 * PIECE + 3], a_prompt(40, seed=dice.randrange(9))]
    return [asked(100 + n, each, deterministic=False, **fields) for n, each in enumerate(prompts)]


def a_folder(path: Path) -> PromptFolder:
    folder = PromptFolder(path, 1 << 30, block=2 * PIECE)
    folder.open()
    return folder


Calls = list[tuple[Any, ...]]
"""What a pass calls, with the shapes of the arguments."""

RECORDED = [
    *((mx, name) for name in ("quantized_matmul", "gather_qmm", "gather_mm")),
    *((mx.fast, name) for name in ("scaled_dot_product_attention", "rope", "rms_norm")),
    *((mx.array, "__matmul__"), (nn.Linear, "__call__")),
]


def _state(cache: Any) -> tuple[Any, ...]:
    """The shapes of a window or a recurrent state. Keys and values of all tokens have room for more
    of them, which no pass reads."""
    arrays = [] if isinstance(cache, BatchKVCache) else tree_flatten(cache.state)
    return (type(cache), *(a.shape for _, a in arrays if isinstance(a, mx.array)))


class Recorder:
    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.passes: list[tuple[list[int], int, Calls]] = []
        """The rows of each pass of a deterministic row, and how many tokens it had before."""
        self._pass: Calls | None = None
        for owner, name in RECORDED:
            patched.setattr(owner, name, self._recorded(name, getattr(owner, name)))
        for kind, name in ((DecodeBatch, "_step"), (PrefillBatch, "prompt")):
            patched.setattr(kind, name, self._of_rows(getattr(kind, name)))

    def _recorded(self, name: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if self._pass is not None:
                arrays = [*arguments, *named.values()]
                shapes = [each.shape for each in arrays if isinstance(each, mx.array)]
                self._pass.append((name, *shapes))
            return function(*arguments, **named)

        return call

    def _of_rows(self, function: Any) -> Any:
        def call(rows: Any, *arguments: Any) -> Any:
            self._pass, before = list(map(_state, rows.prompt_cache)), len(rows.tokens[0])
            try:
                return function(rows, *arguments)
            finally:
                if any(each.deterministic for each in rows.samplers):
                    self.passes.append((list(rows.uids), before, self._pass))
                self._pass = None

        return call


def test_bits_are_the_same_in_company_after_preemptions_and_from_both_caches(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so are the shapes of what each pass computes."""
    asks = [asked(number, prompt) for number, prompt in enumerate(PROMPTS)]
    recorder = Recorder(monkeypatch)
    expected = alone(path, asks)
    passes, recorder.passes = recorder.passes, []
    assert all(calls for _, _, calls in passes)
    for run, known in enumerate(("nothing", "in memory", "on disk")):
        dice = random.Random(run)
        if known != "in memory":
            bench = Bench(path, 1 << 30, disk=a_folder(tmp_path))
        mixed = [*asks, *others(dice)]
        dice.shuffle(mixed)
        bench.reports.clear()
        in_company(bench, mixed, dice)
        assert answers(bench, asks) == expected, known
        assert all(bench.cached[each.row] % PIECE == 0 for each in asks)
        assert known == "nothing" or bench.cached[3] >= 3 * PIECE
        assert all(each in passes for each in recorder.passes), known
        if known == "in memory":
            bench.engine.stop()
    bench.engine.stop()


def test_bits_are_the_same_with_an_adapter_next_to_others(model: Path, tmp_path: Path) -> None:
    adapter = mlx_adapter(tmp_path / "adapter", model)
    asks = [asked(n, prompt, adapter="digest") for n, prompt in enumerate(PROMPTS[1:4])]
    dice, bench = random.Random(5), Bench(model, 1 << 30)
    bench.handle(LoadAdapter("m", "digest", str(adapter)))
    mixed = [*asks, *others(dice, adapter="digest"), asked(50, PROMPTS[3])]
    in_company(bench, mixed, dice)
    expected = alone(model, asks, adapter)
    assert answers(bench, asks) == expected
    assert expected[2] != answers(bench, [mixed[-1]])[0]


def test_log_probabilities_of_the_prompt_change_no_pass_of_the_answer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    (expected,) = alone(model, [asked(0, PROMPTS[3])])
    passes, recorder.passes = recorder.passes, []
    bench, both = Bench(model), asked(0, PROMPTS[3], prompt_logprobs=True)
    bench.handle(both)
    bench.finish()
    assert of(PromptLogprobs, bench.reports)
    assert answers(bench, [both]) == [expected]
    assert recorder.passes == passes


def test_an_earlier_turn_serves_the_next_only_by_whole_pieces_of_its_prompt(model: Path) -> None:
    """What decoding computed of the answer has other bits than the same tokens in a prompt."""
    bench, first = Bench(model, 1 << 30), asked(0, PROMPTS[3], tokens=PIECE - 9)
    bench.handle(first)
    bench.finish()
    said = [token.id for token in tokens_of(0, bench.reports)]
    second = asked(1, [*PROMPTS[3], *said, 1, 2, 3])
    bench.handle(second)
    bench.finish()
    assert bench.cached[1] == 4 * PIECE
    assert answers(bench, [second]) == alone(model, [second])
