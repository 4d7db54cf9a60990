"""The outcomes as a table for the terminal and as one for scripts/bench_parts/README.md."""

from collections.abc import Iterable, Iterator
from math import isnan

from rich.table import Table

from bench_parts.plan import GOALS, LOADING, CaseOutcome, tokens_per_second
from mlx_server.clients.bench import milliseconds

COLUMNS = (
    "model",
    "prompt",
    "prefix",
    "clients",
    "contender",
    "first token, ms",
    "p95",
    "next token, ms",
    "p95",
    "tokens/s",
    "MB",
)
GOAL_COLUMNS = ("goal", "wanted", "measured", "reached")

Row = tuple[str, ...]


def rows(outcomes: Iterable[CaseOutcome]) -> Iterator[Row]:
    for outcome in outcomes:
        case = outcome.case
        times = [
            outcome.median(lambda result: result.first_token.median),
            outcome.median(lambda result: result.first_token.p95),
            outcome.median(lambda result: result.gap.median),
            outcome.median(lambda result: result.gap.p95),
        ]
        yield (
            case.model,
            str(case.words),
            case.prefix,
            str(case.clients),
            outcome.contender,
            *map(milliseconds, times),
            f"{outcome.median(tokens_per_second):.1f}",
            str(outcome.memory >> 20),
        )


def goals(outcomes: list[CaseOutcome], largest_gap: float) -> Iterator[Row]:
    """Yields each goal, what was measured, and whether the goal was reached."""
    what, most = LOADING
    yield what, f"<= {most}", f"{largest_gap:.3f}", "yes" if largest_gap <= most else "no"
    for goal in GOALS:
        value = goal.value(outcomes)
        if value is None or isnan(value):
            continue
        over = f" over {goal.over}" if goal.over else ""
        bound = f"{'<=' if goal.at_most else '>='} {goal.bound}"
        yield goal.what + over, bound, f"{value:.3f}", "yes" if goal.reached(value) else "no"


def terminal(outcomes: list[CaseOutcome], largest_gap: float) -> Iterator[Table]:
    made = Table(*COLUMNS)
    before: Row = ()
    for row in rows(outcomes):
        if before and row[:4] != before[:4]:
            made.add_section()
        made.add_row(*row)
        before = row
    yield made
    yield table(GOAL_COLUMNS, goals(outcomes, largest_gap))


def markdown(outcomes: list[CaseOutcome], largest_gap: float) -> Iterator[str]:
    yield from lines(COLUMNS, rows(outcomes))
    yield ""
    yield from lines(GOAL_COLUMNS, goals(outcomes, largest_gap))


def lines(columns: Row, content: Iterable[Row]) -> Iterator[str]:
    for row in (columns, ("---",) * len(columns), *content):
        yield f"| {' | '.join(row)} |"


def table(columns: Row, content: Iterable[Row]) -> Table:
    made = Table(*columns)
    for row in content:
        made.add_row(*row)
    return made
