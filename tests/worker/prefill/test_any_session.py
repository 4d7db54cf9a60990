"""Whatever sessions do, the prompt cache changes no answer and serves no other key's prompts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_server.engine.messages import ComputeAhead, LimitCache
from tests.worker.lora_files import mlx_adapter, weakened, with_adapter
from tests.worker.one_pass import expected
from tests.worker.prefill.disk_runs import Process, words

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_at_once")]

TOKENS = 2
DISK = 350_000
"""Bytes: sessions push each other's files off it."""


@dataclass(frozen=True)
class Key:
    """What computes a prompt, and for whom."""

    adapter: str | None = None
    adapter_scale: float = 1.0
    cache_scope: str = ""


KEYS = [Key(), Key(cache_scope="key"), Key("digest"), Key("digest", 0.5)]


@dataclass(frozen=True)
class Turn:
    """A prompt that goes on from an earlier one, and what happens before it."""

    follows: int
    """Which of the earlier prompts: 0 for the last one."""
    cut: float
    """The share of it that is left: 1 for the next turn, less for a branch."""
    edit: float | None
    """The place in it of a token that was changed."""
    new: int
    key: Key
    branches: tuple[float, ...]
    """The places, as shares, at which the template says that other prompts may differ."""
    limit: int | None = None
    """The prompt cache's bytes from now on."""
    restarts: bool = False
    is_ahead: bool = False
    """Whether the prompt's beginning is computed before it is asked."""


shares = st.floats(0, 1)
turns = st.builds(
    Turn,
    follows=st.integers(0, 4),
    cut=st.one_of(st.just(1.0), shares),
    edit=st.one_of(st.none(), st.none(), shares),
    new=st.integers(1, 70),
    key=st.sampled_from(KEYS),
    branches=st.lists(shares, max_size=2).map(tuple),
    limit=st.sampled_from([None] * 6 + [1 << 30, 30_000, 0]),
    restarts=st.sampled_from([False, False, False, True]),
    is_ahead=st.sampled_from([False, False, False, True]),
)


@dataclass
class Files:
    model: Path
    adapter: Path
    weaker: Path
    """The adapter at half its scale."""

    @cached_property
    def networks(self) -> dict[tuple[str | None, float], Any]:
        """mlx-lm's, for each adapter and scale."""
        adapters = {(None, 1.0): None, ("digest", 1.0): self.adapter, ("digest", 0.5): self.weaker}
        return {key: with_adapter(self.model, adapter) for key, adapter in adapters.items()}


@pytest.fixture(scope="module")
def files(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("any")
    adapter = mlx_adapter(folder / "lora", path)
    return Files(path, adapter, weakened(folder / "half", adapter, 0.5))


@contextmanager
def running(files: Files, folder: Path) -> Iterator[Process]:
    process = Process(files.model, folder, DISK, files.adapter)
    try:
        yield process
    finally:
        process.stop()


@pytest.mark.slow
@settings(
    max_examples=2,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(session=st.lists(turns, min_size=8, max_size=10))
def test_any_session_is_answered_as_by_a_cold_engine(files: Files, session: list[Turn]) -> None:
    asked: dict[Key, list[list[int]]] = {key: [] for key in KEYS}
    prompts = [words(0, 100)]
    with TemporaryDirectory() as folder:
        while session:
            with running(files, Path(folder)) as process:
                session = until_a_restart(files, process, session, prompts, asked)


def until_a_restart(
    files: Files,
    process: Process,
    session: list[Turn],
    prompts: list[list[int]],
    asked: dict[Key, list[list[int]]],
) -> list[Turn]:
    """Returns the turns that are left."""
    for at, turn in enumerate(session):
        if turn.restarts and at:
            return session[at:]
        prompt = prompt_of(turn, prompts)
        answer = answered(process, turn, prompt)
        model = files.networks[turn.key.adapter, turn.key.adapter_scale]
        assert answer == expected(model, prompt, answer, TOKENS)
        seen = [*asked[turn.key], *([prompt] if turn.is_ahead else [])]
        assert process.known <= max((common(prompt, each) for each in seen), default=0)
        asked[turn.key].append([*prompt, *answer])
        prompts.append([*prompt, *answer])
    return []


def prompt_of(turn: Turn, prompts: list[list[int]]) -> list[int]:
    before = prompts[-1 - turn.follows % len(prompts)]
    prompt = before[: max(1, round(turn.cut * len(before)))]
    if turn.edit is not None:
        place = int(turn.edit * (len(prompt) - 1))
        prompt[place] = (prompt[place] + 1) % 256
    return [*prompt, *words(len(prompts), turn.new)]


def answered(process: Process, turn: Turn, prompt: list[int]) -> list[int]:
    key = turn.key
    if turn.limit is not None:
        process.handle(LimitCache(turn.limit))
    if turn.is_ahead:
        process.handle(
            ComputeAhead("m", prompt, 4096, key.adapter, key.adapter_scale, key.cache_scope)
        )
        process.finish()
    return process.answer(
        prompt,
        TOKENS,
        branches=sorted({int(share * (len(prompt) - 1)) for share in turn.branches}),
        adapter=key.adapter,
        adapter_scale=key.adapter_scale,
        cache_scope=key.cache_scope,
    )


def common(a: list[int], b: list[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
