"""The whole decode contract at once, for every pair of what a request may ask."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from mlx_server.families import family_named
from mlx_server.sources.replay_checkpoint import built_in_tokenizer
from tests.contract import pairs
from tests.contract.answers import Completion, NotAnswered, asked
from tests.contract.pairs import ADAPTED, PAIRED, Row, all_pairs
from tests.live.server import PLAIN, SHALLOW, LiveServer, serving
from tests.worker.lora_files import mlx_adapter

SAME = 16
"""Characters of the shallow model's answer that float noise must leave alone."""
TOGETHER = 48
"""Requests under way. Nearly each has a grammar of its own, and two are compiled at a time."""
ALONE = 6
"""Of so many answers with a seed, one is asked for again by itself, which takes longest."""
ROWS = pairs.rows()
CASES = sorted(ROWS, key=lambda row: row.name.partition(", ")[2])
"""By format and tool choice, so that a few of them, evenly spread, ask for each."""
SEEDED = [row for row in ROWS if row.has("seed")][::ALONE]

HOLDS = "every_pair_of_what_may_be_asked_holds_at_once"
IS_THE_SAME = "an_answer_with_a_seed_is_the_same_by_itself"

Banned = dict[str, list[int]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, shallow_path: Path) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("contract")
    mlx_adapter(folder / "adapters" / "other", shallow_path)
    models: dict[str, Any] = {SHALLOW: {"source": str(shallow_path)}}
    for name in PAIRED:
        (folder / f"{name}.jsonl").write_text(json.dumps(pairs.entry(name)))
        models[name] = {
            "source": f"replay:{name}.jsonl",
            "family": name,
            "constrain_calls": True,
            "repair": {"retries": 0},
        }
    settings = {"concurrency": 32}
    with serving(folder, {"server": settings, "models": models}) as server:
        yield server
        assert "Traceback" not in server.log
        assert " ERROR " not in server.log


@pytest.fixture(scope="module")
def banned(shallow_path: Path) -> Banned:
    shallow = _spelling(Tokenizer.from_file(str(shallow_path / "tokenizer.json")))
    own = {name: _spelling(built_in_tokenizer(family_named(name))) for name in PAIRED}
    return {**own, SHALLOW: shallow, ADAPTED: shallow}


def _spelling(tokenizer: Tokenizer) -> list[int]:
    """The tokens in which it stands, but for delimiters, without which no thought would end."""
    control = tokenizer.get_added_tokens_decoder()
    return [
        id
        for token, id in tokenizer.get_vocab().items()
        if pairs.BANNED in token and id not in control
    ]


def test_every_pair_is_in_the_table() -> None:
    sizes = [4, 2, 3, 2, 2]
    table = list(all_pairs(sizes))
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in table} == {
            (i, j) for i in range(sizes[a]) for j in range(sizes[b])
        }
    assert len(table) <= 16
    assert table == list(all_pairs(sizes))


Found = Completion | Exception


@dataclass(frozen=True)
class Run:
    together: Mapping[str, Found]
    alone: Mapping[str, Found]


@pytest.fixture(scope="module")
def run(server: LiveServer, banned: Banned, request: pytest.FixtureRequest) -> Run:
    """Of the rows that were selected: all of them at once, and then some by themselves."""
    wanted = {item.name for item in request.session.items}
    alone = [row for row in SEEDED if f"test_{IS_THE_SAME}[{row.name}]" in wanted]
    together = [row for row in ROWS if row in alone or f"test_{HOLDS}[{row.name}]" in wanted]
    return asyncio.run(ran(server, banned, together, alone))


async def ran(server: LiveServer, banned: Banned, together: list[Row], alone: list[Row]) -> Run:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, **PLAIN, timeout=300, limits=limits) as http:
        places = asyncio.Semaphore(TOGETHER)

        async def one(row: Row) -> Found:
            async with places:
                try:
                    return await asked(http, row.body(banned))
                except NotAnswered as error:
                    return error

        at_once = await asyncio.gather(*map(one, together))
        later = [await one(row) for row in alone]
    return Run(by_name(together, at_once), by_name(alone, later))


def by_name(rows: list[Row], found: list[Found]) -> Mapping[str, Found]:
    return {row.name: each for row, each in zip(rows, found, strict=True)}


def completed(found: Found) -> Completion:
    if isinstance(found, Exception):
        raise found
    return found


@pytest.mark.parametrize("row", CASES, ids=lambda row: row.name)
def test_every_pair_of_what_may_be_asked_holds_at_once(run: Run, row: Row) -> None:
    row.check(completed(run.together[row.name]))


@pytest.mark.parametrize("row", SEEDED, ids=lambda row: row.name)
def test_an_answer_with_a_seed_is_the_same_by_itself(run: Run, row: Row) -> None:
    together, alone = completed(run.together[row.name]), completed(run.alone[row.name])
    size = None if row.model in PAIRED else SAME
    for one, other in zip(together.answers, alone.answers, strict=True):
        assert (one.text[:size], one.calls and size) == (other.text[:size], other.calls and size)
