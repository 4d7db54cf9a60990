"""Rows compare their prompts with cached ones only where that is of use."""

from typing import Any

import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from mlx_server.engine.messages import Generate
from mlx_server.requests import SamplingParams
from mlx_server.worker.prefill.prompt_cache import PromptCache
from mlx_server.worker.row import row_of
from mlx_server.worker.row_cache import NEAREST, RowCache
from tests.worker.batch_runs import a_prompt

REQUEST = Generate(1, "m", a_prompt(3000), 4, [], SamplingParams(), branches=[700])
PARTING = 300


@pytest.mark.parametrize(
    ("layers", "places"),
    [
        ([KVCache()], ()),
        ([KVCache(), ArraysCache(1)], (PARTING - NEAREST, PARTING, 700, 1024, 2048)),
    ],
    ids=["can be cut", "can't be cut"],
)
def test_only_a_cache_that_can_t_be_cut_has_places(
    layers: list[Any], places: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []

    def parting(self: PromptCache, key: str, tokens: list[int]) -> int:
        compared.append(key)
        return PARTING

    monkeypatch.setattr(PromptCache, "parting", parting)
    cache = RowCache(PromptCache(1 << 20), "m", layers, lambda key: None)
    row = row_of(REQUEST, 300)
    row.snapshot_places = cache.places(REQUEST)
    cache.add_parting(row, REQUEST.prompt, 0)
    assert row.snapshot_places == places
    assert bool(compared) == bool(places)
