"""Runs rows through the engine's own batch, and through mlx-lm's."""

import random
import time
from dataclasses import replace
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.generate import BatchGenerator

from gpu_parts.models import prompt
from mlx_server.engine.messages import Generate
from mlx_server.requests import SamplingParams
from mlx_server.worker.batch import Batch
from mlx_server.worker.prompt_store import PromptStore

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=7)


def _row(number: int, tokens: list[int], most: int, sampling: SamplingParams = GREEDY) -> Generate:
    return Generate(
        row=number, model="", prompt=tokens, max_tokens=most, stop_tokens=[], sampling=sampling
    )


def answers(network: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    batch = Batch(network, concurrency=64)
    found: list[list[int]] = [[] for _ in prompts]
    for number, each in enumerate(prompts):
        batch.add(_row(number, each, tokens))
    while batch:
        for token in batch.step().tokens:
            found[token.row].append(token.id)
    return found


def bits(network: Any, prompts: list[list[int]], deterministic: bool) -> dict[str, int]:
    """How many of the rows have other tokens, or other bits of a log probability, than alone: in
    company of rows that are not deterministic, with a preemption, and from a warm cache."""
    each = [
        _row(number, ids, 12, replace(SAMPLED, logprobs=2)) for number, ids in enumerate(prompts)
    ]
    for row in each:
        row.deterministic = deterministic
    alone = [answer for row in each for answer in _streams(network, [row], PromptStore(0))]
    others = [_row(100 + n, prompt(30 + 40 * n, n), 6) for n in range(5)]
    store = PromptStore(1 << 30)
    company = _streams(network, [*each, *others], store, preempted=0)[: len(each)]
    warm = _streams(network, each, store)
    found = {"in_company": company, "warm": warm}
    return {
        name: sum(a != b for a, b in zip(alone, rows, strict=True)) for name, rows in found.items()
    }


def _streams(
    network: Any, rows: list[Generate], store: PromptStore, preempted: int | None = None
) -> list[list[tuple[int, bytes]]]:
    """The tokens of each row, with their log probabilities."""
    batch = Batch(network, concurrency=64, prompts=store)
    found: dict[int, list[tuple[int, bytes]]] = {row.row: [] for row in rows}
    for row in rows:
        batch.add(row)

    def step() -> None:
        for token in batch.step().tokens:
            found[token.row].append((token.id, msgspec.msgpack.encode(token.logprobs)))

    while batch:
        step()
        if preempted is not None and len(found[preempted]) == 3:
            batch.preempt(preempted)
            step()
            batch.resume(preempted)
            preempted = None
    return [*found.values()]


def tokens_per_second(network: Any, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """The best of three of each."""
    ours, theirs = [], []
    for _ in range(3):
        began = time.perf_counter()
        answers(network, prompts, tokens)
        ours.append(len(prompts) * tokens / (time.perf_counter() - began))
        began = time.perf_counter()
        generator = BatchGenerator(network, max_tokens=tokens, stop_tokens=[])
        generator.insert(prompts)
        while generator.next_generated():
            pass
        theirs.append(len(prompts) * tokens / (time.perf_counter() - began))
    return {"mlx-server": round(max(ours), 1), "mlx-lm": round(max(theirs), 1)}


def first_token_beside(network: Any, tokens: list[int]) -> dict[str, float]:
    """Milliseconds."""
    answers(network, [tokens], 2)  # compiles
    alone, _ = _first(network, tokens, beside=False)
    beside, gap = _first(network, tokens, beside=True)
    return {"alone": alone, "beside": beside, "longest_gap": gap}


def _first(network: Any, tokens: list[int], beside: bool) -> tuple[float, float]:
    batch = Batch(network, concurrency=8)
    if beside:
        batch.add(_row(0, prompt(32, 0), 100_000))
        for _ in range(20):
            batch.step()
    batch.add(_row(1, tokens, 2))
    began = last = time.perf_counter()
    gap = 0.0
    while True:
        rows = {token.row for token in batch.step().tokens}
        now = time.perf_counter()
        if 0 in rows:
            gap, last = max(gap, now - last), now
        if 1 in rows:
            return round((now - began) * 1000, 1), round(gap * 1000, 1)


def forever(network: Any, seconds: float) -> dict[str, Any]:
    dice = random.Random(1)  # noqa: S311  no secret
    batch = Batch(network, concurrency=16)
    until, number, ended = time.perf_counter() + seconds, 0, 0
    memory: list[int] = []
    while batch or time.perf_counter() < until:
        while len(batch.rows) < 16 and time.perf_counter() < until:
            length, most = dice.randrange(1, 300), dice.randrange(1, 60)
            sampling = dice.choice((GREEDY, SAMPLED))
            batch.add(_row(number, prompt(length, number), most, sampling))
            number += 1
        step = batch.step()
        assert not step.failed, step.failed
        ended += sum(token.finish is not None for token in step.tokens)
        if ended % 50 == 0:
            memory.append(mx.get_active_memory())
    mx.clear_cache()
    assert ended == number, f"{number - ended} rows never ended"
    return {"rows": number, "active_first": memory[0], "active_last": mx.get_active_memory()}
