"""The cases that are measured, and the goals for their results."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Literal

from mlx_server.clients.bench import Result, Workload

Model = Literal["demo", "tiny"]


@dataclass(frozen=True)
class Case:
    model: Model
    clients: int
    requests: int
    words: int
    """Words of a prompt; each is one token to the tokenizer of these models."""
    max_tokens: int = 64
    warm: bool = False
    """Whether the prompts share their beginning, which has been asked for before."""

    @property
    def prefix(self) -> str:
        return "warm" if self.warm else "cold"

    def load(self, seed: str) -> Workload:
        return Workload(self.clients, self.requests, self.words, self.max_tokens, self.warm, seed)

    def suits(self, contender: str) -> bool:
        """Whether the contender can run the case. Without a server there is no prefix cache, and
        only one client streams."""
        if contender == "raw-stream" and self.clients > 1:
            return False
        return not (self.warm and contender.startswith("raw"))


CROWD = Case("tiny", 16, 64, 64)
ONE = Case("demo", 1, 2, 64)
SIXTEEN = Case("demo", 16, 32, 64, 128)
TOGETHER = Case("demo", 8, 8, 512, 32)

CASES = (
    Case("tiny", 1, 8, 64),
    Case("tiny", 4, 16, 64),
    Case("tiny", 8, 32, 64),
    CROWD,
    Case("tiny", 1, 8, 512),
    Case("tiny", 4, 8, 512),
    Case("tiny", 8, 16, 512),
    Case("tiny", 16, 32, 512),
    Case("tiny", 16, 64, 64, warm=True),
    Case("tiny", 16, 32, 512, warm=True),
    Case("tiny", 4, 4, 1000, 8, warm=True),
    ONE,
    Case("demo", 4, 4, 64, 32),
    Case("demo", 8, 8, 64, 32),
    Case("demo", 16, 16, 64, 48),
    SIXTEEN,
    Case("demo", 1, 1, 512, 48),
    TOGETHER,
    Case("demo", 1, 1, 512, 48, warm=True),
    Case("demo", 8, 8, 512, 32, warm=True),
)

QUICK = (*CASES[:4], ONE, SIXTEEN)

REPETITIONS: dict[Model, int] = {"tiny": 3, "demo": 2}
"""Repetitions of each case; with --quick one less."""


@dataclass(frozen=True)
class Turn:
    result: Result
    memory: int
    """Resident bytes at the end of the turn."""
    others: float
    """Cores that other processes used meanwhile."""


@dataclass(frozen=True)
class CaseOutcome:
    """The results of one contender in one case, one for each repetition."""

    case: Case
    contender: str
    turns: tuple[Turn, ...]

    def median(self, measure: Callable[[Result], float]) -> float:
        return median(measure(turn.result) for turn in self.turns)

    @property
    def memory(self) -> int:
        return max(turn.memory for turn in self.turns)


def tokens_per_second(result: Result) -> float:
    return result.tokens_per_second


LOADING = ("tiny: largest gap while a model loads, in steps", 5.0)


@dataclass(frozen=True)
class Goal:
    what: str
    case: Case
    measure: Callable[[Result], float]
    bound: float
    over: str | None = None
    """The contender by whose value ours is divided; None to take our value itself."""
    at_most: bool = False

    def reached(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound

    def value(self, outcomes: Iterable[CaseOutcome]) -> float | None:
        """Returns None if a contender or case that it needs was not measured."""
        found = {o.contender: o.median(self.measure) for o in outcomes if o.case == self.case}
        ours, theirs = found.get("mlx-server"), found.get(self.over) if self.over else 1.0
        return None if ours is None or theirs is None else ours / theirs


GOALS = (
    Goal("demo, 1 client: tokens/s", ONE, tokens_per_second, 0.97, "raw-stream"),
    Goal("demo, 16 clients: tokens/s", SIXTEEN, tokens_per_second, 0.95, "raw-batch"),
    Goal("tiny, 16 clients: tokens/s", CROWD, tokens_per_second, 1.3, "mlx_lm.server"),
    Goal(
        "tiny, 16 clients: seconds to the first token",
        CROWD,
        lambda result: result.first_token.median,
        0.080,
        at_most=True,
    ),
    Goal(
        "tiny, 16 clients: the same, p95",
        CROWD,
        lambda result: result.first_token.p95,
        0.120,
        at_most=True,
    ),
    Goal(
        "demo, 8 x 512 together: mean time to the first token",
        TOGETHER,
        lambda result: result.first_token.mean,
        0.65,
        "mlx_lm.server",
        at_most=True,
    ),
    Goal("demo, 8 x 512 together: tokens/s", TOGETHER, tokens_per_second, 1.0, "mlx_lm.server"),
)
