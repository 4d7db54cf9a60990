"""Measures the contenders in turn, several times, so that whatever slows the machine slows all of
them."""

import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Protocol

import msgspec
import typer
from rich.console import Console, RenderableType

from bench_parts import (
    adapters,
    against,
    background,
    distributed,
    first_token,
    gateway,
    grammars,
    parsing,
    tables,
    training,
)
from bench_parts import kv_bits as drift
from bench_parts.adapters import Columns, Measured
from bench_parts.contenders import CONTENDERS, Contender
from bench_parts.machine import Others
from bench_parts.models import model_folder
from bench_parts.plan import CASES, QUICK, REPETITIONS, Case, CaseOutcome, Model, Turn
from bench_parts.sessions import count
from bench_parts.simulated import links, schedules, servers, short_prompts, tiers
from bench_parts.simulated.roofline import PAIRS, pair
from bench_parts.speculation import report

PIPE_WIDTH = 120
MOST_OTHERS = 0.1
"""The most cores that other processes may use without a warning."""


class Scenario(Protocol):
    """What is measured on a simulated machine."""

    COLUMNS: tables.Row

    def measured(self, pair: str, server: str, own: Path | None) -> Any: ...
    def rows(self, found: list[Any]) -> Iterator[tables.Row]: ...


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
progress = Console(stderr=True, highlight=False)


@app.command()
def main(
    quick: Annotated[bool, typer.Option("--quick", help="Run fewer cases: four minutes.")] = False,
    model: Annotated[
        Model | None, typer.Option(help="Only this model; demo is a real one.")
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="LIST", help="Only these contenders.", show_default=True)
    ] = ",".join(CONTENDERS),
    repetitions: Annotated[
        int | None,
        typer.Option(min=1, help="Repetitions of each case [tiny 3, demo 2; --quick: one less]."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all measurements to this file.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables in Markdown.")] = False,
    commit: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="COMMIT",
            help="Measure instead what this checkout costs over another commit, over "
            "mlx_lm.server or vllm-mlx, in turns.",
        ),
    ] = "",
    lora: Annotated[
        bool, typer.Option("--lora", help="Measure adapters instead, on the demo model.")
    ] = False,
    structured: Annotated[
        bool, typer.Option("--structured", help="Measure instead what grammars cost a step.")
    ] = False,
    by_parser: Annotated[
        bool, typer.Option("--parsing", help="Measure instead what reading an answer costs.")
    ] = False,
    sessions: Annotated[
        bool,
        typer.Option(
            "--sessions",
            help="Count instead how many tokens of agents' sessions are computed again.",
        ),
    ] = False,
    by_gateway: Annotated[
        bool,
        typer.Option(
            "--gateway", help="Measure instead a server that is asked through another one."
        ),
    ] = False,
    kv_bits: Annotated[
        bool, typer.Option("--kv-bits", help="Measure keys and values in fewer bits instead.")
    ] = False,
    speculation: Annotated[
        bool,
        typer.Option(
            "--speculation", help="Count tokens a pass instead, and simulate what they are worth."
        ),
    ] = False,
    by_tiers: Annotated[
        bool,
        typer.Option(
            "--tiers",
            help="Measure instead a stream next to sub-agents and a batch: simulated, and here.",
        ),
    ] = False,
    by_batch: Annotated[
        bool, typer.Option("--batch", help="Measure instead a batch next to its requests alone.")
    ] = False,
    by_training: Annotated[
        bool,
        typer.Option("--train", help="Measure trainings instead, and streams next to one."),
    ] = False,
    of_first_token: Annotated[
        bool,
        typer.Option("--first-token", help="Measure instead where the time to a first token goes."),
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="With --sessions: restart the servers in the middle.")
    ] = False,
    swap: Annotated[
        bool, typer.Option("--swap", help="With --sessions: load another model in the middle.")
    ] = False,
    over_ranks: Annotated[
        bool,
        typer.Option("--distributed", help="Measure instead what a step over several ranks costs."),
    ] = False,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE:MODEL|all|schedules|links",
            help="Measure schedules on simulated Macs instead; schedules: all, by a virtual clock; "
            "links: one Mac or two for a model.",
        ),
    ] = None,
    short: Annotated[
        bool, typer.Option("--short", help="With --simulate: 16 short prompts at once instead.")
    ] = False,
    machines: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read more machines and models from this file, in TOML."),
    ] = None,
) -> None:
    """Compare this server with mlx-lm's server, and with MLX without a server.

    \b
    scripts/bench
    scripts/bench --quick --model tiny
    scripts/bench --only mlx-server,mlx_lm.server --json before.json
    scripts/bench --against main~20 --quick --model tiny
    scripts/bench --lora
    scripts/bench --structured
    scripts/bench --parsing
    scripts/bench --sessions
    scripts/bench --kv-bits
    scripts/bench --speculation
    scripts/bench --tiers
    scripts/bench --batch
    scripts/bench --train
    scripts/bench --first-token
    scripts/bench --gateway
    scripts/bench --sessions --restart --swap --only mlx-server
    scripts/bench --distributed --model tiny
    scripts/bench --simulate m4-max:gpt-oss-120b
    scripts/bench --simulate all --only mlx-server
    scripts/bench --simulate all --short
    scripts/bench --simulate schedules
    scripts/bench --simulate links

    Latencies are medians of all answers unless they say p95, and every number is the median of
    its repetitions. A prefix is warm if the prompts share it and an earlier request had it.
    """
    if lora or structured:
        (_lora if lora else _structured)(json, markdown)
        return
    if by_gateway:
        _gateway(repetitions or gateway.TURNS, json, markdown)
        return
    if over_ranks:
        _distributed([model] if model else ["tiny", "demo"], json, markdown)
        return
    if kv_bits:
        _kv_bits(json, markdown)
        return
    if speculation:
        _speculation(json, markdown)
        return
    if by_parser:
        read = list(parsing.readings())
        _show({"parsing": read}, [(parsing.COLUMNS, parsing.rows(read))], json, markdown)
        return
    if by_tiers:
        _tiers(model or "tiny", json, markdown)
        return
    if by_batch:
        _batch(json, markdown)
        return
    if by_training:
        _training(json, markdown)
        return
    if of_first_token:
        parts = list(first_token.shares())
        table = (first_token.COLUMNS, first_token.rows(parts))
        _show({"first_token": parts}, [table], json, markdown)
        return
    if sessions:
        wanted: list[count.Interruption] = ["restart"] if restart else []
        wanted += ["swap"] if swap else []
        _sessions(only.split(","), wanted or [""], json, markdown)
        return
    if simulate == "links":
        _links(json, markdown)
        return
    if simulate == "schedules":
        _schedules(json, markdown)
        return
    if simulate:
        scenario: Scenario = short_prompts if short else servers
        _simulated(scenario, simulate, machines, only.split(","), json, markdown)
        return
    cases = [case for case in (QUICK if quick else CASES) if model in (None, case.model)]
    times = {model: repetitions or count - quick for model, count in REPETITIONS.items()}
    if commit:
        _against(commit, cases, times, json, markdown)
        return
    _throughput(cases, only.split(","), times, json, markdown)


def _throughput(
    cases: Sequence[Case],
    names: Sequence[str],
    times: Mapping[Model, int],
    json: Path | None,
    markdown: bool,
) -> None:
    if unknown := set(names) - set(CONTENDERS):
        raise typer.BadParameter(f"--only knows no {', '.join(sorted(unknown))}.")
    outcomes = measure(cases, names, times)
    gap = _largest_gap()
    if json:
        json.write_bytes(msgspec.json.encode(outcomes))
    if markdown:
        Console().out("\n".join(tables.markdown(outcomes, gap)), highlight=False)
    else:
        _print(tables.terminal(outcomes, gap))
    _warn(max((turn.others for outcome in outcomes for turn in outcome.turns), default=0.0))


def _against(
    commit: str,
    cases: Sequence[Case],
    repetitions: Mapping[Model, int],
    json: Path | None,
    markdown: bool,
) -> None:
    try:
        name, there = against.server_of(commit)
    except subprocess.CalledProcessError as error:
        raise typer.BadParameter(f"--against {commit}: {error}") from error
    others, found = Others(), list[against.Cost]()
    progress.out(f"here: {against.HERE}, there: {name}")
    for model, turns in repetitions.items():
        own = [case for case in cases if case.model == model]
        folder = model_folder(model)
        costs = against.costs(there, folder, own, turns) if own else ()
        firsts = against.first_requests(there, folder, model) if own else ()
        for cost in chain(costs, firsts):
            found.append(cost)
            progress.out(" ".join(next(against.rows([cost]))))
    _show({"against": found}, [(against.COLUMNS, against.rows(found))], json, markdown)
    _warn(others.cores())


def _lora(json: Path | None, markdown: bool) -> None:
    others = Others()
    folder = model_folder("demo")
    costs, sides = adapters.costs(folder), adapters.side_by_side(folder)
    found = [adapters.decoding(costs), adapters.servers(sides), adapters.goals(costs)]
    _show({"costs": costs, "servers": sides}, found, json, markdown)
    _warn(others.cores())


def _structured(json: Path | None, markdown: bool) -> None:
    others = Others()
    costs = grammars.costs(model_folder("demo"))
    _show(costs, [grammars.decoding(costs), grammars.goals(costs)], json, markdown)
    _warn(others.cores())


def _sessions(
    only: Sequence[str],
    interruptions: Sequence[count.Interruption],
    json: Path | None,
    markdown: bool,
) -> None:
    found = []
    for each in count.counts(only, interruptions):
        found.append(each)
        progress.out(" ".join(next(count.rows([each]))))
    _show({"sessions": found}, [(count.COLUMNS, count.rows(found))], json, markdown)


def _gateway(turns: int, json: Path | None, markdown: bool) -> None:
    others, costs = Others(), []
    for each in gateway.costs(turns):
        costs.append(each)
        progress.out(" ".join(next(gateway.rows([each]))))
    found = [(gateway.COLUMNS, gateway.rows(costs)), (tables.GOAL_COLUMNS, gateway.goals(costs))]
    _show({"gateway": costs}, found, json, markdown)
    _warn(others.cores())


def _kv_bits(json: Path | None, markdown: bool) -> None:
    found = list(drift.drifts())
    _show({"kv_bits": found}, [(drift.COLUMNS, drift.rows(found))], json, markdown)


def _speculation(json: Path | None, markdown: bool) -> None:
    found = list[report.Measured]()
    for each in report.measurements():
        found.append(each)
        progress.out(" ".join(next(report.rows([each]))))
    _show({"speculation": found}, [(report.COLUMNS, report.rows(found))], json, markdown)


def _tiers(model: Model, json: Path | None, markdown: bool) -> None:
    found, others = list(tiers.measurements()), Others()
    pace = background.kept_pace(model)
    shown = [(tiers.COLUMNS, tiers.rows(found)), (background.COLUMNS, background.pace_rows(pace))]
    _show({"tiers": found, "here": pace}, shown, json, markdown)
    _warn(others.cores())


def _batch(json: Path | None, markdown: bool) -> None:
    others, cost = Others(), background.batch_cost()
    _show({"batch": cost}, [(background.COLUMNS, background.batch_rows(cost))], json, markdown)
    _warn(others.cores())


def _training(json: Path | None, markdown: bool) -> None:
    others, costs, streams = Others(), training.costs(), background.streams_beside()
    shown = [
        (training.COLUMNS, training.rows(costs)),
        (background.COLUMNS, background.stream_rows(streams)),
    ]
    _show({"costs": costs, "streams": streams}, shown, json, markdown)
    _warn(others.cores())


def _distributed(models: list[Model], json: Path | None, markdown: bool) -> None:
    others, found = Others(), []
    for each in distributed.costs(models):
        found.append(each)
        progress.out(" ".join(next(distributed.rows([each]))))
    shown = [(distributed.COLUMNS, distributed.rows(found))]
    _show({"distributed": found}, shown, json, markdown)
    _warn(others.cores())


def _simulated(
    scenario: Scenario,
    named: str,
    own: Path | None,
    only: Sequence[str],
    json: Path | None,
    markdown: bool,
) -> None:
    pairs = PAIRS if named == "all" else named.split(",")
    for each in pairs:
        try:
            pair(each, own)
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise typer.BadParameter(f"--simulate: {error}") from error
    found = []
    for each in pairs:
        for server in [server for server in servers.SERVERS if server in only]:
            found.append(scenario.measured(each, server, own))
            progress.out(" ".join(next(scenario.rows(found[-1:]))))
    progress.out(servers.NOTE)
    _show({"simulated": found}, [(scenario.COLUMNS, scenario.rows(found))], json, markdown)


def _links(json: Path | None, markdown: bool) -> None:
    found = list(links.link_speeds())
    progress.out(links.NOTE)
    shown = [(links.COLUMNS, links.rows(found)), (links.LEAST_COLUMNS, links.least_rows())]
    _show({"links": found}, shown, json, markdown)


def _schedules(json: Path | None, markdown: bool) -> None:
    found, prices = [*schedules.rows()], [*schedules.price_rows()]
    shown = [(schedules.COLUMNS, iter(found)), (schedules.PRICE_COLUMNS, iter(prices))]
    _show({"schedules": found, "deterministic": prices}, shown, json, markdown)


def _show(measured: Measured, found: Sequence[Columns], json: Path | None, markdown: bool) -> None:
    if json:
        json.write_bytes(msgspec.json.encode(measured))
    if markdown:
        text = "\n\n".join("\n".join(tables.lines(*each)) for each in found)
        Console().out(text, highlight=False)
    else:
        _print(tables.table(*each) for each in found)


def _print(found: Iterable[RenderableType]) -> None:
    console = Console()
    console.width = console.width if console.is_terminal else PIPE_WIDTH
    console.print(*found)


def _largest_gap() -> float:
    command = [sys.executable, "-m", "bench_parts.loading", str(model_folder("tiny"))]
    return median(
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(REPETITIONS["tiny"])
    )


def _warn(others: float) -> None:
    if others > MOST_OTHERS:
        progress.out(
            f"Other processes took up to {others:.1f} cores meanwhile: these numbers are too bad, "
            "and unequally so. Measure again when this machine is quiet."
        )


def measure(
    cases: Sequence[Case], names: Sequence[str], repetitions: Mapping[Model, int]
) -> list[CaseOutcome]:
    turns: dict[tuple[Case, str], list[Turn]] = {}
    for model, times in repetitions.items():
        if wanted := [case for case in cases if case.model == model]:
            for case, name, turn in _turns(model_folder(model), wanted * times, names):
                turns.setdefault((case, name), []).append(turn)
    return [CaseOutcome(case, name, tuple(taken)) for (case, name), taken in turns.items()]


def _turns(
    folder: Path, cases: Sequence[Case], names: Sequence[str]
) -> Iterator[tuple[Case, str, Turn]]:
    with ExitStack() as stack:
        running = {name: stack.enter_context(CONTENDERS[name](folder)) for name in names}
        for case in cases:
            # The same prompts for all, which none of them has seen.
            seed = secrets.token_hex(8)
            for name, contender in running.items():
                if case.suits(name):
                    yield case, name, _turn(case, name, contender, seed)


def _turn(case: Case, name: str, contender: Contender, seed: str) -> Turn:
    others = Others()
    result = contender.run(case.load(seed))
    failed = f"; {len(result.errors)} failed: {result.errors[0]}" if result.errors else ""
    progress.out(
        f"{time.strftime('%X')} {case.model} {case.words} tokens, {case.prefix}, "
        f"{case.clients} clients, {name}: {result.tokens_per_second:.0f} tokens/s, first after "
        f"{result.first_token.median * 1000:.0f} ms{failed}"
    )
    return Turn(result, contender.memory(), others.cores())


if __name__ == "__main__":
    app(prog_name="scripts/bench")
