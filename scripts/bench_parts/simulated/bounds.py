"""The least times of schedules that compute prompts one after the other, or so many at a time, on a
simulated Mac.

The best of these computes each in the pieces that take least with the step that the decoding rows
get after each; a piece and a step are no longer than a gap.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import inf
from statistics import mean

from bench_parts.simulated.roofline import pair, seconds
from bench_parts.simulated.virtual import CrowdTimes
from mlx_server.worker.prefill.schedule import FIRST_WEIGHT

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


def tile_gap(named: str, rows: int, context: int) -> float:
    """Returns the gap of the least piece that fills a tile, and a step of so many rows."""
    return _piece(named, TILE, context) + step(named, rows, context)


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
    sizes = {max(1, size // rows) for size in SIZES}
    for left in sorted({tokens - at for at in range(0, tokens, min(sizes))}):
        costs = [
            (_piece(named, size, tokens - left, rows) + stepping, *best[left - size])
            for size in {*(n for n in sizes if n < left), left}
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
    for longer than `gap`, or than for a step and the smallest piece. streams: the rows that decode
    already and go on."""
    sizes = [rows for rows in range(1, count + 1) if count % rows == 0]
    ways = (_crowd(named, tokens, prompt, count // rows, rows, gap, streams) for rows in sizes)
    return min(ways, key=waited)


def waited(times: CrowdTimes) -> float:
    """Returns what schedules make least of: both times, as they weigh them."""
    return FIRST_WEIGHT * times.first_token + times.done


def _crowd(
    named: str, tokens: int, prompt: int, groups: int, rows: int, gap: float, streams: int
) -> CrowdTimes:
    now, left, firsts = 0.0, list[float](), list[float]()
    for _ in range(groups):
        share = 1.0  # of the group's tokens that are left
        while share > 1e-9:
            decoding = streams + len(left)
            stepping = step(named, decoding, prompt) if decoding else 0.0
            longest = gap if decoding else inf
            took, steps = _prompts(named, prompt - 1, rows, stepping, longest)
            part = min(share, *(tokens / steps for tokens in left)) if left else share
            now, share = now + part * took, share - part
            left = [tokens - part * steps for tokens in left]
            left = [tokens for tokens in left if tokens > 1e-9]
        now += step(named, rows, prompt)
        left += [tokens - 1.0] * rows
        firsts.append(now)
    rest = sum(_rest(named, sorted(left), streams, prompt))
    return CrowdTimes(mean(firsts), now + rest, gap)


def _rest(named: str, left: list[float], streams: int, context: int) -> Iterator[float]:
    """Yields the seconds of the steps after the last prompt, while fewer and fewer rows go on."""
    done = 0.0
    for at, tokens in enumerate(left):
        yield (tokens - done) * step(named, streams + len(left) - at, context)
        done = tokens
