"""More long answers than fit into memory: all come to their end, with the tokens that each has
alone, those that came first before the others, and the engine takes no more than the budget."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlx_server.engine.messages import KvCost, StepOutput, Token
from mlx_server.generation.generate import generate
from mlx_server.models.files import weights_bytes
from mlx_server.pool import lease
from mlx_server.pool.engine_models import PoolLimits
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec
from mlx_server.requests import GenerateRequest, SamplingChoices
from tests.tiny import tiny_llama
from tests.worker.batch_runs import a_prompt

PROMPT, ANSWER, CLIENTS = 40, 230, 4
NO_END = {0: -100.0, 2: -100.0}
SLACK = 0.05

CHOICES: list[SamplingChoices] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.7},
]


def requests() -> list[GenerateRequest]:
    return [
        GenerateRequest(
            "m",
            (tuple(a_prompt(PROMPT, seed=n)),),
            max_tokens=ANSWER,
            logit_bias=NO_END,
            choices=CHOICES[n % len(CHOICES)],
            seed=n,
            client=f"client {n}",
        )
        for n in range(CLIENTS)
    ]


@dataclass
class Seen:
    """What the engine said of each row, and what it took."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    active: int = 0
    reserved: int = 0
    together: int = 0

    def step(self, step: StepOutput, pool: Pool) -> None:
        self.active = max(self.active, step.active_bytes)
        self.reserved = max(self.reserved, pool.memory()["used"])
        self.together = max(self.together, len(step.tokens))
        for token in step.tokens:
            self._take(token)

    def _take(self, token: Token) -> None:
        self.tokens.setdefault(token.row, []).append(token.id)
        if token.finish:
            self.ended.append(token.row)

    @property
    def answers(self) -> list[list[int]]:
        return [self.tokens[row] for row in sorted(self.tokens)]


async def served(source: Path, asked: Sequence[GenerateRequest], budget: int, rows: int) -> Seen:
    """So many at a time."""
    seen, pool = Seen(), Pool([ModelSpec("m", str(source))], PoolLimits(budget=budget))
    pool.events.step = lambda step: seen.step(step, pool)
    places = asyncio.Semaphore(rows)

    async def one(request: GenerateRequest) -> None:
        async with places, aclosing(generate(request, pool)) as events:
            async for _ in events:
                pass

    await pool.start()
    try:
        await asyncio.gather(*map(one, asked))
        assert pool.memory()["kv_reserved"] == 0
    finally:
        await pool.stop()
    return seen


def test_all_come_to_their_end_and_nobody_sees_that_he_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "SOON", 32)
    monkeypatch.setattr(lease, "MARGIN", 8)
    caplog.set_level(logging.INFO, "mlx_server.pool")
    source = tiny_llama(tmp_path / "m", layers=2)
    full = KvCost(2 * 2 * 2 * 16 * 4).for_tokens(PROMPT + ANSWER)
    budget = weights_bytes(source, upcast=True) + int(2.2 * full)

    alone = asyncio.run(served(source, requests(), budget, 1))
    assert "memory is short" not in caplog.text
    crowd = asyncio.run(served(source, requests(), budget, CLIENTS))
    assert "memory is short" in caplog.text
    assert crowd.together > 2, "more than would fit if each had its room from the start"
    assert sorted(crowd.answers) == sorted(alone.answers)  # rows are numbered as they begin
    assert all(len(answer) == ANSWER for answer in crowd.answers)
    assert crowd.ended == sorted(crowd.ended)
    assert crowd.reserved <= budget
    assert crowd.active <= budget * (1 + SLACK)
