"""What our schedules make of each simulated Mac, by a virtual clock that no load of this machine
changes, and what deterministic rows cost there."""

from collections.abc import Iterator

from bench_parts.simulated.roofline import PAIRS
from bench_parts.simulated.virtual import (
    CrowdTimes,
    Simulation,
    crowd,
    long_prompt_next_to_stream,
    together_by_mlx_lm,
)
from bench_parts.tables import Row

COLUMNS = (
    "machine, model",
    "15k prompt next to a stream, times",
    "longest gap, s",
    "8 x 2k: mean first token (answers of 32 / 256)",
    "all done",
    "16 x 200: mean first token",
    "all done",
    "longest gap, s",
)
SHORT = 200, 16, 32
"""The tokens of short prompts, their number and the tokens of their answers."""


def short_prompts(named: str) -> CrowdTimes:
    """Returns the times of short prompts that come at once next to a stream."""
    simulation, (prompt, count, answer) = Simulation(named, concurrency=32), SHORT
    stream = simulation.ask(300, 100_000, "stream")
    while len(stream.times) < 60:
        simulation.step()
    asked = simulation.now
    answers = [simulation.ask(prompt, answer, "crowd") for _ in range(count)]
    while not all(each.ended for each in answers):
        simulation.step()
    first = sum(each.first_token for each in answers) / count
    return CrowdTimes(first, simulation.now - asked, max(stream.between(asked, simulation.now)))


def rows() -> Iterator[Row]:
    """Yields times of crowds as shares of those of mlx_lm.server's batch."""
    for named in PAIRS:
        long, short = long_prompt_next_to_stream(named, 15_000), short_prompts(named)
        pairs = [(crowd(named, n), together_by_mlx_lm(named, n)) for n in (32, 256)]
        pairs.append((short, together_by_mlx_lm(named, SHORT[2], SHORT[0], SHORT[1])))
        first = [f"{ours.first_token / theirs.first_token:.2f}" for ours, theirs in pairs]
        done = [f"{ours.done / theirs.done:.2f}" for ours, theirs in pairs]
        yield (
            named.replace(":", ", "),
            f"{long.first_token / long.alone:.2f}",
            f"{long.longest_gap:.2f}",
            " / ".join(first[:2]),
            " / ".join(done[:2]),
            first[2],
            done[2],
            f"{short.longest_gap:.2f}",
        )


PRICED = (1, 4, 8, 16)
PRICE_COLUMNS = ("machine, model", *(f"{rows} at once" for rows in PRICED), "15k prompt, times")


def price_rows() -> Iterator[Row]:
    """Yields the tokens a second of deterministic rows as a share of those of others."""
    for named in PAIRS:
        shares = [_speed(named, rows, True) / _speed(named, rows, False) for rows in PRICED]
        times = _prompt(named, True) / _prompt(named, False)
        yield named.replace(":", ", "), *(f"{share:.2f}" for share in shares), f"{times:.2f}"


def _speed(named: str, rows: int, deterministic: bool) -> float:
    simulation = Simulation(named)
    answers = [simulation.ask(100, 60, deterministic=deterministic) for _ in range(rows)]
    simulation.run()
    begin = max(answer.times[0] for answer in answers)
    tokens = sum(time > begin for answer in answers for time in answer.times)
    return tokens / (max(answer.times[-1] for answer in answers) - begin)


def _prompt(named: str, deterministic: bool) -> float:
    simulation = Simulation(named)
    for tokens in (20, 15_000):
        answer = simulation.ask(tokens, 2, deterministic=deterministic)
        simulation.run()
    return answer.first_token
