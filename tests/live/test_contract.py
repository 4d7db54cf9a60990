"""The whole decode contract at once, for every pair of what a request may ask."""

import asyncio
import json
from collections.abc import Iterator
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
    settings = {"concurrency": 32, "queue": 1024}
    with serving(folder, {"server": settings, "models": models}) as server:
        yield server
        assert "Traceback" not in server.log
        assert " ERROR " not in server.log


@pytest.fixture(scope="module")
def banned(shallow_path: Path) -> dict[str, list[int]]:
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


def test_every_pair_of_what_may_be_asked_holds_at_once(
    server: LiveServer, banned: dict[str, list[int]]
) -> None:
    table = pairs.rows()

    async def run() -> list[str]:
        async with httpx.AsyncClient(
            base_url=server.url,
            **PLAIN,
            timeout=300,
            limits=httpx.Limits(max_connections=None),
        ) as http:
            places = asyncio.Semaphore(TOGETHER)

            async def one(row: Row) -> Completion | Exception:
                async with places:
                    try:
                        return await asked(http, row.body(banned))
                    except NotAnswered as error:
                        return error

            together = await asyncio.gather(*map(one, table))
            beside = list(zip(table, together, strict=True))
            faults = [fault for row, found in beside if (fault := _fault(row, found))]
            seeded = [each for each in beside if each[0].has("seed")]
            for row, found in seeded[::ALONE]:
                if isinstance(found, Completion):
                    faults += _changed(row, found, await one(row))
            return faults

    faults = asyncio.run(run())
    assert not faults, f"{len(faults)} of {len(table)}:\n" + "\n".join(faults)


def _fault(row: Row, found: Completion | Exception) -> str | None:
    try:
        if isinstance(found, Exception):
            raise found
        row.check(found)
    except Exception as error:
        return f"{row.name}: {str(error) or error!r}"[:600]
    return None


def _changed(row: Row, together: Completion, alone: Completion | Exception) -> Iterator[str]:
    size = None if row.model in PAIRED else SAME
    if isinstance(alone, Exception):
        yield f"{row.name}, alone: {alone}"
        return
    for one, other in zip(together.answers, alone.answers, strict=True):
        if (one.text[:size], one.calls and size) != (other.text[:size], other.calls and size):
            yield f"{row.name}: {other} alone, {one} beside others"
