"""Rows of one scope never use the cached prompts of another one."""

from typing import Any

from mlx_server.engine.messages import Generate
from mlx_server.requests import SamplingParams
from mlx_server.worker.batch import Batch
from mlx_server.worker.prefill.prompt_cache import PromptCache
from tests.worker.batch_runs import a_prompt


def cached(batch: Batch, number: int, scope: str) -> int:
    row = Generate(number, "m", a_prompt(60), 4, [], SamplingParams(temperature=0.0))
    row.cache_scope = scope
    batch.add(row)
    found = -1
    while batch:
        for prefilled in batch.step().prefilled:
            found = prefilled.cached_tokens
    return found


def test_each_scope_has_its_own_prompts(tiny_model: Any) -> None:
    cache = PromptCache(1 << 30)
    batch = Batch(tiny_model, concurrency=4, key="m", cache=cache)
    asked = ["", "", "a", "b", "a", "b", ""]
    found = [cached(batch, number, scope) for number, scope in enumerate(asked, 1)]
    assert found == [0, 59, 0, 0, 59, 59, 59]
    cache.forget("m")
    assert cache.nbytes == 0
