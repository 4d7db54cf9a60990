"""Measures this checkout and another commit in turns, and prints what ours costs over the other."""

import secrets
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from bench_parts.contenders import PEERS, Contender, Start, mlx_server
from bench_parts.plan import Case, Model, tokens_per_second
from bench_parts.tables import Row
from mlx_server.clients.bench import Result, Workload

HERE = Path(__file__).parents[2]
CHECKOUTS = HERE / ".against"
"""Each commit that was compared with, with an environment of its own."""
CHECKOUT = """
root=$1
if [ ! -d "$root" ]; then
    rm -rf "$root.unfinished" && mkdir -p "$root.unfinished"
    git archive "$0" | tar -x -C "$root.unfinished"
    mv "$root.unfinished" "$root"
fi
cd "$root"
. scripts/_venv
ensure_venv ""
"""
"""For /bin/sh, with a commit and a folder for its files."""
WORSE = 1.05
FIRST, STARTS = 10, 3
"""The requests of a server that has just started, and how often one is started."""
SHORT = Workload(clients=1, requests=1, words=64, max_tokens=8)
COLUMNS = ("model", "prompt", "prefix", "clients", "what", "here", "there", "cost", "")


def server_of(commit: str) -> tuple[str, Start]:
    """Returns the commit's short name and a contender that runs it, after checking it out. A peer
    is known by its name.

    Raises CalledProcessError if git knows no such commit or its packages can't be installed."""
    if commit in PEERS:
        return commit, PEERS[commit]
    command = [
        "git",
        "rev-parse",
        "--short",
        "--verify",
        "--end-of-options",
        f"{commit}^{{commit}}",
    ]
    name = _output(command).decode().strip()
    subprocess.run(
        ["/bin/sh", "-eu", "-c", CHECKOUT, name, str(CHECKOUTS / name)], cwd=HERE, check=True
    )
    return name, partial(mlx_server, python=CHECKOUTS / name / ".venv/bin/python")


def _output(command: Sequence[str]) -> bytes:
    return subprocess.run(command, cwd=HERE, check=True, stdout=subprocess.PIPE).stdout


@dataclass(frozen=True)
class Cost:
    """What one figure is here and there, one pair for each turn. More is worse."""

    case: Case
    what: str
    pairs: tuple[tuple[float, float], ...]

    @property
    def ratio(self) -> float:
        return median(here / there for here, there in self.pairs)


def _milliseconds_a_token(result: Result) -> float:
    return 1000 / tokens_per_second(result)


FIGURES: dict[str, Callable[[Result], float]] = {
    "first token, mean, ms": lambda result: result.first_token.mean * 1000,
    "first token, ms": lambda result: result.first_token.median * 1000,
    "first token p95, ms": lambda result: result.first_token.p95 * 1000,
    "next token, mean, ms": lambda result: result.gap.mean * 1000,
    "all clients, ms a token": _milliseconds_a_token,
}


PROCESSOR = "processor, with warming up, ms a request"
"""What a busy machine changes least."""


def costs(there: Start, folder: Path, cases: Sequence[Case], turns: int) -> Iterator[Cost]:
    with ExitStack() as stack:
        servers = [stack.enter_context(start(folder)) for start in (mlx_server, there)]
        for case in cases:
            measured = []
            for turn in range(turns):
                workload = case.load(secrets.token_hex(8))
                order = servers[:: -1 if turn % 2 else 1]  # who is first has a colder machine
                figures = [_figures(server, workload) for server in order]
                measured.append(figures[:: -1 if turn % 2 else 1])
            for what in measured[0][0]:
                yield Cost(
                    case, what, tuple((ours[what], theirs[what]) for ours, theirs in measured)
                )


def _figures(server: Contender, workload: Workload) -> dict[str, float]:
    used = server.processor_seconds()
    result = server.run(workload)
    processor = server.processor_seconds() - used
    figures = {what: figure(result) for what, figure in FIGURES.items()}
    return {**figures, PROCESSOR: 1000 * processor / workload.requests}


def first_requests(there: Start, folder: Path, model: Model) -> Iterator[Cost]:
    """Yields what the first request after "ready" takes, and the tenth."""
    starts = [[_first(start, folder) for start in (mlx_server, there)] for _ in range(STARTS)]
    for number in (0, FIRST - 1):
        pairs = tuple((ours[number], theirs[number]) for ours, theirs in starts)
        case = Case(model, SHORT.clients, SHORT.requests, SHORT.words, SHORT.max_tokens)
        yield Cost(case, f"request {number + 1} of a new server, ms", pairs)


def _first(start: Start, folder: Path) -> list[float]:
    """The milliseconds to the first token of each of the first requests of a new server."""
    with start(folder) as server:
        return [
            server.measure(replace(SHORT, seed=str(number))).first_token.median * 1000
            for number in range(FIRST)
        ]


def rows(found: Sequence[Cost]) -> Iterator[Row]:
    for cost in found:
        here, there = (f"{median(values):.1f}" for values in zip(*cost.pairs, strict=True))
        case = (cost.case.model, str(cost.case.words), cost.case.prefix, str(cost.case.clients))
        verdict = "worse" if cost.ratio > WORSE else ""
        yield *case, cost.what, here, there, f"{cost.ratio:.2f}", verdict
