"""An engine that answers rows with adapters, and mlx-lm's own answers to compare them with."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_server.engine.messages import (
    AdapterLoaded,
    LoadAdapter,
    Report,
    Token,
    UnloadAdapter,
    Unloaded,
)
from mlx_server.requests import SamplingParams
from tests.worker.batch_runs import CLOSE, Ask, a_prompt, alone
from tests.worker.bench import Answers, Bench
from tests.worker.lora_files import linears_of, mlx_adapter, network, weakened, with_adapter

GREEDY = SamplingParams(temperature=0)
SEEN = SamplingParams(temperature=0, logprobs=2)
TOKENS = 6
EMBEDDINGS = ("model.embed_tokens", "lm_head")


@dataclass(frozen=True)
class RowRequest:
    """One request: what it says, with which adapter and how much of it."""

    prompt: list[int]
    adapter: str | None = None
    scale: float = 1.0


class Desk(Bench):
    """One engine, and what its rows with adapters were given so far."""

    def __init__(self, path: Path, cache_bytes: int = 0) -> None:
        self.answers: dict[int, list[int]] = {}
        super().__init__(path, cache_bytes, concurrency=16)

    @property
    def model(self) -> Any:
        return self.batch.model

    def load_adapter(self, adapter: str, folder: Path) -> Report:
        (report,) = self.handle(LoadAdapter("m", adapter, str(folder)))
        return report

    def loaded(self, **folders: Path) -> "Desk":
        for adapter, folder in folders.items():
            assert isinstance(self.load_adapter(adapter, folder), AdapterLoaded)
        return self

    def unload(self, adapter: str) -> None:
        assert self.handle(UnloadAdapter("m", adapter))[-1] == Unloaded("m", adapter)

    def ask(self, row_request: RowRequest, tokens: int = TOKENS, **rest: Any) -> int:
        fields = {"adapter": row_request.adapter, "adapter_scale": row_request.scale, **rest}
        row = self.begin(row_request.prompt, tokens, **fields)
        self.answers[row] = []
        return row

    def step(self) -> Answers:
        tokens = super().step()
        for row, more in tokens.items():
            self.answers[row] += more
        return tokens

    def all_of(self, row_requests: Sequence[RowRequest], tokens: int = TOKENS) -> list[list[int]]:
        rows = [self.ask(row_request, tokens) for row_request in row_requests]
        self.finish()
        return [self.answers[row] for row in rows]


class Reference:
    """mlx-lm with one adapter, or none, and one row at a time."""

    def __init__(self, path: Path, adapter: Path | None) -> None:
        self.model = with_adapter(path, adapter)

    def answer(self, prompt: list[int], tokens: int = TOKENS) -> list[Token]:
        return alone(self.model, Ask(prompt, tokens, sampling=SEEN))

    def assert_begins(self, prompt: list[int], answer: list[int]) -> None:
        """Each token is the likeliest after those before it, or ties with it: then both are right.

        So it is what mlx-lm would generate, found in one pass instead of one a token."""
        if answer:
            cache = make_prompt_cache(self.model)
            (logits,) = self.model(mx.array([[*prompt, *answer[:-1]]]), cache=cache)
            logits = logits[len(prompt) - 1 :]
            chosen = mx.take_along_axis(logits, mx.array(answer)[:, None], axis=-1)[:, 0]
            assert mx.all(logits.max(axis=-1) - chosen < CLOSE), answer

    def assert_is(self, prompt: list[int], answer: list[int], tokens: int = TOKENS) -> None:
        assert len(answer) == tokens
        self.assert_begins(prompt, answer)


def assert_same(answer: list[int], reference: list[Token]) -> None:
    """Up to a step where the two likeliest tokens tie: from there both ways are right."""
    assert len(answer) == len(reference)
    for id, token in zip(answer, reference, strict=True):
        assert token.logprobs
        (_, first), (_, second) = token.logprobs.top
        if id != token.id:
            assert first - second < CLOSE
            return


@dataclass(frozen=True)
class Case:
    """A checkpoint, two adapters for all that it has, and the second at half its strength."""

    path: Path
    one: Path
    two: Path
    half: Path

    @cached_property
    def references(self) -> dict[tuple[str | None, float], Reference]:
        folders = {(None, 1.0): None, ("one", 1.0): self.one, ("two", 1.0): self.two}
        folders["two", 0.5] = self.half
        return {use: Reference(self.path, folder) for use, folder in folders.items()}


def a_case(path: Path, folder: Path) -> Case:
    embeddings = [k for k, _ in network(path).named_modules() if k in EMBEDDINGS]
    keys = [*linears_of(path), *embeddings]
    one = mlx_adapter(folder / "one", path, seed=1, keys=keys)
    two = mlx_adapter(folder / "two", path, seed=2, rank=7, keys=keys)
    return Case(path, one, two, weakened(folder / "half", two, 0.5))


def mixed() -> list[RowRequest]:
    uses: list[tuple[str | None, float]] = [(None, 1.0), ("one", 1.0), ("two", 1.0), ("two", 0.5)]
    lengths = [5, 40, 300, 2, 70, 9, 33, 1]
    return [RowRequest(a_prompt(n, seed=i), *uses[i % 4]) for i, n in enumerate(lengths)]
