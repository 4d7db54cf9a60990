"""The least times of schedules that compute one prompt after the other, on a simulated Mac.

The best of these computes each prompt in the pieces that take least with the
step that the decoding rows get after each; a piece and a step are no longer than a gap.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import inf
from statistics import mean

from bench_parts.simulated.roofline import pair, seconds
from bench_parts.simulated.virtual import CrowdTimes

SIZES = (16, *range(32, 512, 32), *range(512, 2049, 128))
"""The tokens of pieces that are tried: whole tiles, the least of which may be half a one."""

TILE = 32


@lru_cache(maxsize=1 << 16)
def step(named: str, rows: int, context: int) -> float:
    """Returns the seconds of a step, padded as it is cheapest."""
    contexts = [context] * rows
    return min(seconds(*pair(named), 1, contexts, padding) for padding in range(TILE))


@lru_cache(maxsize=1 << 18)
def _piece(named: str, tokens: int, context: int, rows: int = 1) -> float:
    return seconds(*pair(named), tokens, [context + tokens] * rows)


def least_gap(named: str, prompt: int, times: float) -> float:
    """Returns the least gap with which a long prompt next to a stream can take so many times as
    long as alone."""
    places, one = range(250, prompt, 500), step(named, 1, 300)

    def a_token(at: int, stepping: float, gap: float) -> float:
        took = ((n, _piece(named, n, at) + stepping) for n in (*range(1, TILE), *SIZES))
        return min((seconds / n for n, seconds in took if seconds <= gap), default=inf)

    alone = sum(a_token(at, 0.0, inf) for at in places)
    gaps = (hundredths / 100 for hundredths in range(1, 300))
    return next(g for g in gaps if sum(a_token(at, one, g) for at in places) <= times * alone)


@lru_cache(maxsize=1 << 10)
def _prompts(named: str, tokens: int, rows: int, stepping: float, gap: float) -> tuple[float, int]:
    """Returns the least seconds of prompts that are computed together, and of the steps after their
    pieces, and the number of these."""
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    for left in sorted({tokens - at for at in range(0, tokens, SIZES[0])}):
        costs = [
            (_piece(named, size, tokens - left, rows) + stepping, *best[left - size])
            for size in {*(n for n in SIZES if n < left), left}
            if left - size in best
        ]
        longest = max(gap, min(took for took, *_ in costs))
        ways = ((took + rest, steps + 1) for took, rest, steps in costs if took <= longest)
        best[left] = min(ways)
    return best[tokens]


def least_crowd(
    named: str, tokens: int, prompt: int, count: int, gap: float, streams: int = 0
) -> CrowdTimes:
    """Returns the times of prompts that arrive together in the best schedule in which no row waits
    for longer than `gap`, or than for a step and the smallest piece. Experts, which prompts share
    the reads of, may be computed for several at once. streams: the rows that decode already and go
    on."""
    experts = pair(named)[1].experts
    sizes = [rows for rows in range(1, count + 1 if experts else 2) if count % rows == 0]
    ways = (_crowd(named, tokens, prompt, count // rows, rows, gap, streams) for rows in sizes)
    return min(ways, key=lambda times: times.first_token)


def _crowd(
    named: str, tokens: int, prompt: int, groups: int, rows: int, gap: float, streams: int
) -> CrowdTimes:
    now, left, firsts = 0.0, list[float](), list[float]()
    for _ in range(groups):
        for _ in range(2):  # rows that end meanwhile count as ended before
            decoding = streams + len(left)
            stepping = step(named, decoding, prompt) if decoding else 0.0
            longest = gap if decoding else inf
            took, steps = _prompts(named, prompt - 1, rows, stepping, longest)
            left = [tokens for tokens in left if tokens > steps]
        now += took + step(named, rows, prompt)
        left = [tokens - steps for tokens in left] + [tokens - 1] * rows
        firsts.append(now)
    rest = sum(_rest(named, sorted(left), streams, prompt))
    return CrowdTimes(mean(firsts), now + rest, gap)


def _rest(named: str, left: list[float], streams: int, context: int) -> Iterator[float]:
    """Yields the seconds of the steps after the last prompt, while fewer and fewer rows go on."""
    done = 0.0
    for at, tokens in enumerate(left):
        yield (tokens - done) * step(named, streams + len(left) - at, context)
        done = tokens
