"""The command line of scripts/attack."""

import sys
from typing import Annotated

import httpx
import typer
from bench_parts.models import model_folder
from rich.console import Console
from rich.table import Table

from attack_parts import neighbours
from attack_parts.outcomes import ANSWERED, OUTCOMES, table, under_attack
from attack_parts.servers import Server, mlx_lms, ours
from attack_parts.upstreams import attacked_by_upstreams
from tests.hostile.corpus import Attack, Target, attacks

VOCABULARY = 49_152
"""The number of token ids of the demo model, in its tokenizer and in its output head."""
UPSTREAMS = "upstreams"
"""The category of attacks by another server, for which this server is a gateway."""
BEYOND_ALL = 10_000_000
"""The assumed vocabulary of a server for which `--vocabulary` is not given."""


def main(
    url: Annotated[
        str | None, typer.Argument(help="Base URL of a server; without it, two are started.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Id of its model; by default the first it lists.")
    ] = None,
    vocabulary: Annotated[int, typer.Option(help="Number of the model's token ids.")] = BEYOND_ALL,
    category: Annotated[str | None, typer.Option(help="Only the attacks of this category.")] = None,
    only: Annotated[str | None, typer.Option(help="Only mlx-server or mlx_lm.server.")] = None,
    beside: Annotated[
        str | None,
        typer.Option(help="Instead: what a stream notices of this attack by others, or of `all`."),
    ] = None,
) -> None:
    """Send a server what any server of the OpenAI API should refuse or answer.

    An attack counts as answered if the status is below 500 and, where it is 200, the answer is
    complete. Where no answer is possible, closing the connection is enough. After each attack a
    fixed greedy request has to get the same answer as before.

    In the category `upstreams` another server attacks this one, which has sent it a request. Then
    `/health` has to answer within 100 ms, and memory may grow by ten times what was sent.
    """
    if category == UPSTREAMS and not url:
        _attack_by_upstreams()
        return
    if url:
        servers = [Server(url, url, model or _first_model(url))]
    else:
        folder = model_folder("tiny")
        vocabulary = VOCABULARY
        servers = [each for each in (ours(folder), mlx_lms(folder)) if only in (None, each.name)]
    for server in servers:
        if beside:
            _beside(server, None if beside == "all" else beside)
            continue
        _attack(server, Target(server.model, vocabulary, vocabulary), category)
    if not (url or category or only == "mlx_lm.server"):
        _attack_by_upstreams()


def _attack_by_upstreams() -> None:
    shown = Table("attack", "MB sent", "s", "/health ms", "MB grown", "held", title=UPSTREAMS)
    for name, effects, failures in attacked_by_upstreams(model_folder("tiny")):
        sizes = (f"{effects.sent / 1e6:.1f}", f"{effects.seconds:.1f}")
        cost = (f"{effects.health * 1e3:.0f}", f"{effects.growth / 1e6:.0f}")
        shown.add_row(name, *sizes, *cost, ", ".join(failures) or "held")
        sys.stderr.write(f"{name}: {', '.join(failures) or 'held'}\n")
    Console(width=100).print(shown)


def _attack(server: Server, target: Target, category: str | None) -> None:
    wanted = [each for each in attacks(target) if each.everywhere]
    chosen = [each for each in wanted if category in (None, each.category)]
    found: list[tuple[Attack, list[str]]] = []
    for attack, outcomes in under_attack(server, chosen):
        found.append((attack, outcomes))
        if outcomes != [ANSWERED]:
            sys.stderr.write(f"{server.name}: {attack}: {', '.join(outcomes)}\n")
    shown = Table("category", "attacks", *OUTCOMES, title=server.name)
    for row in table(found):
        shown.add_row(*row)
    Console(width=100).print(shown)


def _beside(server: Server, attack: str | None) -> None:
    """Prints how a stream goes on while other clients attack, and how long a newcomer waits."""
    columns = ("attack", "median gap", "longest gap", "newcomer", "same tokens")
    shown = Table(*columns, title=server.name)
    for row in neighbours.rows(server, attack):
        sys.stderr.write(f"{'  '.join(row)}\n")
        shown.add_row(*row)
    Console(width=100).print(shown)


def _first_model(url: str) -> str:
    listed = httpx.get(f"{url.removesuffix('/v1')}/v1/models", trust_env=False).json()
    found: str = listed["data"][0]["id"]
    return found


typer.run(main)
