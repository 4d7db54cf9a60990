"""What is asked of a server, and what a run of it gave."""

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
"""Each is one token to most tokenizers."""

OWN_WORDS = 8
"""At the end of prompts that share their beginning."""


@dataclass(frozen=True)
class Workload:
    """Each of the clients asks again when it has its answer, until all requests are made."""

    clients: int
    requests: int
    words: int
    """Of a prompt."""
    max_tokens: int
    shared_prefix: bool = False
    """All prompts begin alike; else each begins with words of its own."""
    seed: str = ""
    """Another one gives other prompts, which no cache has seen."""

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
    """Between two values where it falls between them."""
    place = (len(ascending) - 1) * percent / 100
    below, above = ascending[math.floor(place)], ascending[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


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
        """Of the median prompt, if the server counts them."""
        counts = [a.prompt_tokens for a in self.answers if a.prompt_tokens is not None]
        return statistics.median_low(counts) if counts else None
