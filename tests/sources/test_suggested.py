"""Models that are suggested for a machine: with the pool's own estimate, and by which names."""

from unittest import mock

import pytest

from mlx_server.errors import ModelNotFound
from mlx_server.families import family_named
from mlx_server.pool.memory import memory_budget
from mlx_server.sources.kinds import HUB_ID
from mlx_server.sources.suggested import hub_id, suggested_models
from mlx_server.worker.kv_caches import cache_cost
from tests.pool.test_memory import CHECKPOINTS, WORKING_SETS
from tests.tables import cases

BY_NAME = {each.id.removeprefix("mlx-community/"): each for each in suggested_models()}
SMALL, LARGE = (memory_budget(None, WORKING_SETS[ram]).nbytes for ram in (16, 128))


def test_the_table() -> None:
    sizes = [each.bytes for each in suggested_models()]
    assert sizes == sorted(sizes)
    for each in suggested_models():
        assert HUB_ID.fullmatch(each.id)
        assert family_named(each.family)
        assert 4 <= len(each.good_at.split()) <= 7


@pytest.mark.parametrize(
    ("name", "same_layers"),
    [
        ("gpt-oss-20b-MXFP4-Q8", "gpt-oss-20b-MXFP4-Q8"),
        ("gpt-oss-120b-MXFP4-Q8", "gpt-oss-120b"),
        ("Llama-3.3-70B-Instruct-4bit", "Llama-3.3-70B-Instruct-4bit"),
    ],
)
def test_caches_take_what_the_pool_counts(name: str, same_layers: str) -> None:
    assert BY_NAME[name].kv == CHECKPOINTS[same_layers].kv


def test_the_caches_of_gemma_4() -> None:
    with mock.patch("mlx.core.metal.is_available", return_value=True):
        cost = cache_cost({"model_type": "gemma4_text", "vocab_size": 256})
    assert BY_NAME["gemma-4-e2b-it-4bit"].kv == cost


@cases
def test_what_fits_a_mac(ram: int, largest: str) -> None:
    budget = memory_budget(None, WORKING_SETS[ram]).nbytes
    fitting = [name for name, model in BY_NAME.items() if model.context_in(budget)]
    assert fitting[-1] == largest


def test_a_name_is_understood_or_what_it_may_mean_is_suggested() -> None:
    for name in ("gpt-oss-20b", "GPT_OSS-20B", "gpt-oss-20b-mxfp4-q8"):
        assert hub_id(name, SMALL) == "mlx-community/gpt-oss-20b-MXFP4-Q8"
    for kept in ("org/name", "./folder", "~/folder", "demo:smollm2", "hf:org/name"):
        assert hub_id(kept, SMALL) == kept
    with pytest.raises(ModelNotFound, match=r"Qwen3-0.6B-4bit or .*Qwen3.5-9B-4bit\. Name one"):
        hub_id("qwen3", SMALL)
    with pytest.raises(ModelNotFound, match="gpt-oss-20b-MXFP4-Q8 or mlx-community/gpt-oss-120b"):
        hub_id("gpt-oss", LARGE)
    with pytest.raises(ModelNotFound, match="None of that name fits this machine"):
        hub_id("gpt-oss", SMALL)
    with pytest.raises(ModelNotFound, match="no hub id"):
        hub_id("nope", SMALL)
