"""Prompts that come at once and share a cached prefix are computed together."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_server.worker.prefill.schedule import PrefillBudget
from tests.worker.bench import Bench
from tests.worker.prefill.disk_runs import words

pytestmark = pytest.mark.slow

PREFIX, OWN, CLIENTS = words(0, 1000), 60, 4


@contextmanager
def passes(bench: Bench) -> Iterator[list[tuple[int, int]]]:
    """The rows and tokens of each forward pass with several tokens."""
    network = type(bench.engine.models.batches["m"].model)
    compute, found = network.__call__, list[tuple[int, int]]()

    def counting(self: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        if inputs.shape[1] > 1:
            found.append(inputs.shape)
        return compute(self, inputs, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "__call__", counting)
        yield found


def begun(bench: Bench, seed: int) -> int:
    prompt = [*PREFIX, *words(seed, OWN)]
    return bench.begin(prompt, 8, branches=[len(PREFIX)], client=f"client {seed}")


def test_they_take_the_passes_of_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cold, warm = Bench(path), Bench(path, cache_bytes=1 << 30)
    monkeypatch.setattr(PrefillBudget, "ends", lambda *_: False)
    monkeypatch.setattr(PrefillBudget, "piece", lambda *_, **__: 512)  # has room for all
    begun(warm, seed=99)
    warm.finish()
    with passes(warm) as alone:
        begun(warm, seed=98)
        warm.finish()
    with passes(warm) as together:
        rows = [begun(warm, seed) for seed in range(CLIENTS)]
        answers = warm.finish()
    assert [warm.cached[row] for row in rows] == [len(PREFIX)] * CLIENTS
    assert together == [(CLIENTS, OWN - 1)] == [(CLIENTS, tokens) for _, tokens in alone]
    expected = [cold.answer([*PREFIX, *words(seed, OWN)], 8) for seed in range(CLIENTS)]
    assert [answers[row] for row in rows] == expected


def test_a_prompt_with_few_new_tokens_is_copied_at_its_end(llama: Path) -> None:
    """The keys and values of a long conversation take gigabytes: a copy for its last line would be
    for nobody."""
    bench = Bench(llama, cache_bytes=1 << 30)
    memory = bench.engine.prompts.memory
    bench.begin(PREFIX, 2)
    bench.finish()
    before = memory.nbytes
    for new, is_copied in ((5, False), (OWN, True)):
        bench.begin([*PREFIX, *words(new, new)], 8)
        while not bench.step():
            pass
        assert memory.nbytes == before, "a first token does not wait for a copy"
        bench.step()
        assert (memory.nbytes > before) is is_copied
        bench.finish()
        before = memory.nbytes
    again = bench.begin([*PREFIX, *words(5, 5), *words(9, 9)], 2)
    bench.finish()
    assert bench.cached[again] == len(PREFIX) + 5
