"""The memory budget holds: what the engine takes, seen from outside, while four models of which two
fit are loaded and evicted, short answers join a long one, the prompt cache is full, and long
prompts and sixteen answers at once fight for what is left.

Counted is what the process holds beyond what it holds when a model of their kind has been served
by it and unloaded: the budget is for weights and caches, not for Python, MLX and what its kernels
work in.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from mlx_server.models.files import weights_bytes
from mlx_server.pool.memory import footprint
from tests.live.server import LiveServer, Watch, eventually, serving
from tests.tiny import tiny_llama

pytestmark = pytest.mark.alone

LAYERS, WIDTH = 8, 384
NO_END = {"0": -100, "2": -100}
SLACK = 0.05
LOOK_SECONDS = 0.005

PROMPT = 700
CHUNK = 4 * PROMPT * PROMPT * 4 + 6 * PROMPT * WIDTH * 4
"""Bytes that a prefill of so many tokens works in: the scores of its heads and its activations."""

LAYER = 2 * 256 * WIDTH // 2 * 4
"""Bytes of 256 keys and values, as many as a short row has, in one layer: a second copy of a layer
is made whenever a row joins or leaves a batch, next to what the budget holds."""

Ask = tuple[str, int, dict[str, Any]]
"""A model, the length of the prompt, and what else is asked."""

LOADS: list[Ask] = [(id, 10, {"max_tokens": 2}) for id in "abcdabcd"]
SHORT: list[Ask] = [("a", 5, {"max_tokens": 15})] * 12
FIGHT: list[Ask] = [
    *[(id, PROMPT, {"max_tokens": 2}) for id in "ac"],
    *[(id, 5, {"max_tokens": 4}) for id in "ddca"],
    *[(id, 10, {"max_tokens": 4, "n": 16}) for id in "ab"],
]


@dataclass(frozen=True)
class Arena:
    server: LiveServer
    budget: int
    idle: int
    """Bytes of the engine's process before the first of the four is loaded."""

    def ask(self, model: str, prompt: int, **more: Any) -> int:
        """The status of the answer."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "x" * prompt}],
            "logit_bias": NO_END,
        }
        with self.server.http() as http:
            http.timeout = 120
            return http.post("/v1/chat/completions", json={**body, **more}).status_code

    @contextmanager
    def long_answer(self) -> Iterator[None]:
        """Under way for as long as the block runs, or 250 tokens."""
        asked = {"model": "a", "prompt": "x" * PROMPT, "max_tokens": 250, "stream": True}
        with self.server.http() as http:
            body = {**asked, "logit_bias": NO_END}
            with http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: {")
                yield
                assert next(lines) == ""  # httpx hangs up when no one holds them any more

    def memory(self, what: str) -> int:
        """By the server's own count."""
        with self.server.http() as http:
            return int(http.get("/v1/pool").json()["memory"][what])

    def most(self, asks: list[Ask]) -> int:
        """Bytes that all of them took together, at the worst."""
        look, seen = partial(footprint, self.server.engine.pid), list[int]()
        with (
            Watch(lambda: seen.append(look()), LOOK_SECONDS),
            ThreadPoolExecutor(len(asks)) as threads,
        ):
            statuses = set(threads.map(lambda ask: self.ask(ask[0], ask[1], **ask[2]), asks))
        assert statuses == {200}
        assert max(seen) > self.idle
        return max(seen) - self.idle


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    folder = tmp_path_factory.mktemp("arena")
    source = tiny_llama(folder / "model", layers=LAYERS, hidden=WIDTH)
    budget = int(2.7 * weights_bytes(source, upcast=True))
    config = {
        "server": {"memory_budget": budget},
        "models": {
            "first": {"source": str(source), "ttl": 0.1},
            **{id: {"source": str(source)} for id in "abcd"},
        },
    }
    with serving(folder / "server", config) as server:
        arena = Arena(server, budget, 0)
        assert arena.ask("first", PROMPT, max_tokens=2) == 200
        assert arena.ask("first", 10, n=8, max_tokens=2) == 200
        eventually(lambda: arena.memory("used") == 0, "the first model is unloaded")
        yield Arena(server, budget, footprint(server.engine.pid))


def test_loads_and_evictions(arena: Arena) -> None:
    assert arena.most(LOADS) <= arena.budget * (1 + SLACK)


def test_short_answers_beside_a_long_one(arena: Arena) -> None:
    """Their batch would pad them to its length."""
    with arena.long_answer():
        assert arena.most(SHORT) <= arena.budget * (1 + SLACK)


def test_the_prompt_cache_gives_way(arena: Arena) -> None:
    assert arena.ask("a", 2 * PROMPT, max_tokens=2) == 200
    assert arena.memory("prompt_cache") > 2 * SLACK * arena.budget
    rows = 8
    most = arena.most([("b", 5, {"max_tokens": 8, "n": rows})])
    assert most <= arena.budget * (1 + SLACK) + rows * LAYER


def test_everything_at_once(arena: Arena) -> None:
    assert arena.most(FIGHT) <= arena.budget + max(arena.budget * SLACK, CHUNK)
