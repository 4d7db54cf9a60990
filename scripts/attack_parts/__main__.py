"""The command line of scripts/attack."""

import sys
from typing import Annotated

import httpx
import typer
from bench_parts.models import model_folder
from rich.console import Console
from rich.table import Table

from attack_parts.servers import Server, mlx_lms, ours
from attack_parts.tally import ANSWERED, OUTCOMES, table, under_attack
from tests.hostile.corpus import Attack, Target, attacks

VOCABULARY = 49_152
"""Of the demo model's tokenizer, and of its head."""
BEYOND_ALL = 10_000_000
"""The vocabulary of a server that does not name its own."""


def main(
    url: Annotated[str | None, typer.Argument(help="Of any server of the OpenAI API.")] = None,
    model: Annotated[str | None, typer.Option(help="Its id; the first one it lists.")] = None,
    vocabulary: Annotated[int, typer.Option(help="How many tokens its model has.")] = BEYOND_ALL,
    category: Annotated[str | None, typer.Option(help="Only these attacks.")] = None,
    only: Annotated[str | None, typer.Option(help="mlx-server or mlx_lm.server.")] = None,
) -> None:
    """Attack a server with what any server of the OpenAI API should refuse or answer.

    An attack counts as answered by a status below 500 and, where that is 200, a whole answer;
    closing the line will do where there is nothing to answer. After each a fixed greedy request
    has to say what it said before.
    """
    if url:
        servers = [Server(url, url, model or _first_model(url))]
    else:
        folder = model_folder("tiny")
        vocabulary = VOCABULARY
        servers = [each for each in (ours(folder), mlx_lms(folder)) if only in (None, each.name)]
    for server in servers:
        _attack(server, Target(server.model, vocabulary, vocabulary), category)


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


def _first_model(url: str) -> str:
    listed = httpx.get(f"{url.removesuffix('/v1')}/v1/models", trust_env=False).json()
    found: str = listed["data"][0]["id"]
    return found


typer.run(main)
