"""Measures the contenders in turn, again and again, so that what slows this machine slows all."""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console

from bench_parts import tables
from bench_parts.contenders import CONTENDERS, Contender
from bench_parts.models import model_folder
from bench_parts.plan import CASES, QUICK, Case, Outcome, tokens_per_second
from mlx_server.bench import Result

progress = Console(stderr=True, highlight=False)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases: two minutes.")] = False,
    model: Annotated[
        Literal["demo", "tiny"] | None, typer.Option(help="Only this one; demo is a real one.")
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="LIST", help="Of raw-stream, raw-batch, ...")
    ] = ",".join(CONTENDERS),
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="Of each case [3; with --quick 2].")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all that was measured to it.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables for README.md.")] = (
        False
    ),
) -> None:
    """This server beside mlx-lm's own, and beside MLX with no server at all.

    \b
    scripts/bench
    scripts/bench --quick --model tiny
    scripts/bench --only mlx-server,mlx_lm.server --json before.json
    """
    names = [name for name in CONTENDERS if name in only.split(",")]
    cases = [case for case in (QUICK if quick else CASES) if model in (None, case.model)]
    outcomes = measure(cases, names, repetitions or (2 if quick else 3))
    if json:
        json.write_bytes(msgspec.json.encode(tables.plain(outcomes)))
    console = Console(width=None if Console().is_terminal else 120)
    if markdown:
        for line in tables.markdown(outcomes):
            console.out(line, highlight=False)
    else:
        console.print(*tables.terminal(outcomes))


def measure(cases: Sequence[Case], names: Sequence[str], repetitions: int) -> list[Outcome]:
    results: dict[tuple[Case, str], list[tuple[Result, int]]] = {}
    for model in dict.fromkeys(case.model for case in cases):
        folder = model_folder(model)
        with ExitStack() as stack:
            running = {name: stack.enter_context(CONTENDERS[name](folder)) for name in names}
            for _ in range(repetitions):
                for case in cases:
                    if case.model == model:
                        for name, measured in _turn(case, running):
                            results.setdefault((case, name), []).append(measured)
    return [
        Outcome(case, name, tuple(r for r, _ in measured), max(memory for _, memory in measured))
        for (case, name), measured in results.items()
    ]


def _turn(case: Case, running: dict[str, Contender]) -> Iterator[tuple[str, tuple[Result, int]]]:
    """The same prompts for all, which none of them has seen."""
    load = case.load(secrets.token_hex(8))
    for name, contender in running.items():
        if not case.suits(name):
            continue
        result = contender.run(load)
        _tell(case, name, result)
        yield name, (result, contender.memory())


def _tell(case: Case, name: str, result: Result) -> None:
    failed = f"; {len(result.errors)} failed: {result.errors[0]}" if result.errors else ""
    progress.out(
        f"{time.strftime('%X')} {case.model} {case.words} tokens, {case.prefix}, "
        f"{case.clients} clients, {name}: {tokens_per_second(result):.0f} tokens/s, first after "
        f"{result.first_token.median * 1000:.0f} ms{failed}"
    )


if __name__ == "__main__":
    typer.run(main)
