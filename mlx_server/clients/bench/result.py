"""The workload of a bench run, and its result."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from mlx_server.clients.bench.exchange import RequestTiming

TEXT = (
    "time way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number "
    "night point home water room mother area money story fact month lot right study book eye job "
    "word business issue side kind head house service friend father power hour game line end "
    "member law car city community name president team minute idea kid body information back "
    "parent face others level office door health person art war history party result change"
)
WORDS = tuple(TEXT.split())
"""Words for prompts, each of which most tokenizers encode as one token."""

OWN_WORDS = 8
"""The number of words at the end of a prompt that it does not share with others."""


@dataclass(frozen=True)
class Workload:
    """The requests of one run. Each client sends the next one as soon as its answer is complete,
    until `requests` have been sent."""

    clients: int
    requests: int
    words: int
    """The length of each prompt, in words."""
    max_tokens: int
    shared_prefix: bool = False
    """Whether all prompts begin with the same words."""
    seed: str = ""
    """Prompts are drawn from it. A seed that was not used before makes prompts that are in no
    prompt cache."""

    def prompts(self) -> list[str]:
        return [self.prompt(number) for number in range(self.requests)]

    def prompt(self, number: int) -> str:
        own = min(OWN_WORDS, self.words // 2) if self.shared_prefix else self.words
        shared = _words(self.seed, self.words - own)
        return " ".join([*shared, *_words(f"{self.seed} {number}", own)])


def _words(seed: str, count: int) -> list[str]:
    return Random(seed).choices(WORDS, k=count)  # noqa: S311  nothing secret


@dataclass(frozen=True)
class Spread:
    mean: float
    median: float
    p95: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        found = sorted(values)
        if not found:
            return cls(math.nan, math.nan, math.nan)
        return cls(statistics.fmean(found), percentile(found, 50), percentile(found, 95))


def percentile(ascending: Sequence[float], percent: float) -> float:
    """The percentile of sorted values, interpolated linearly between the two nearest ones."""
    rank = (len(ascending) - 1) * percent / 100
    below, above = ascending[math.floor(rank)], ascending[math.ceil(rank)]
    return below + (above - below) * (rank - math.floor(rank))


@dataclass(frozen=True)
class Result:
    workload: Workload
    seconds: float
    answers: tuple[RequestTiming, ...]
    errors: tuple[str, ...] = ()

    @property
    def first_token(self) -> Spread:
        return Spread.of(answer.first_token for answer in self.answers)

    @property
    def gap(self) -> Spread:
        return Spread.of(gap for answer in self.answers for gap in answer.gaps)

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the median prompt; None if the server reports no usage."""
        counts = [a.prompt_tokens for a in self.answers if a.prompt_tokens is not None]
        return statistics.median_low(counts) if counts else None
