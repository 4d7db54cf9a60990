"""The share of a model that a rank has, and what the ranks agree on; all ranks are real."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import pytest

from mlx_server.worker.costs import StepCosts, products_of
from mlx_server.worker.kernels import Chip, Product
from mlx_server.worker.share import Share
from tests.live.ranks import loopback_group

PROGRAM = """
import json, sys
import mlx.core as mx, mlx.nn as nn, msgspec
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_server.engine.worker_arguments import RankGroup
from mlx_server.worker import share as shares
from mlx_server.worker.kernels import Chip
from mlx_server.worker.share import joined_share

rank = int(sys.argv[1])
share = joined_share(msgspec.json.decode(sys.argv[2], type=RankGroup), rank)

def reading(steps, failure=None):
    for done in range(1, steps + 1):
        if failure and done == failure:
            raise OSError(f"/secret/place: rank {rank} has no such file")
        yield done, 10 * steps
    return f"network {rank}"

def load(loading):
    seen = []
    while True:
        try:
            seen.append(next(loading))
        except StopIteration as end:
            return seen, end.value, share.nbytes(None)
        except ValueError as error:
            return seen, str(error), None

class Model(nn.Module):
    def __init__(self, caches):
        super().__init__()
        self._caches = caches

    def make_cache(self):
        return self._caches

def costs(mode):
    share._mode, shares.this_chip = mode, lambda: Chip(15 - 2 * rank)
    layers = Model([KVCache()])
    layers.up = nn.QuantizedLinear(512, 512 * (1 + rank), bits=4)
    return share.step_costs(layers).curve.least[:40].tolist()

print(json.dumps([
    load(share.together(reading(1 + 2 * rank))),
    load(share.together(reading(2, failure=2 if rank else None))),
    share.is_alike(Model([KVCache(), RotatingKVCache(8)])),
    share.is_alike(Model([KVCache(), RotatingKVCache(8 + rank)])),
    share.step_costs(Model([KVCache()] * (1 + rank))).is_alike,
    *map(costs, ["tensor", "pipeline"]),
]))
"""


@pytest.fixture(scope="module")
def of_both() -> list[list[Any]]:
    """What each of two ranks found."""
    group = msgspec.json.encode(loopback_group(2)).decode()
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), group], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        found = [json.loads(process.communicate(timeout=60)[0]) for process in running]
    finally:
        for process in running:
            process.kill()
    return [list(each) for each in zip(*found, strict=True)]


@pytest.mark.slow
def test_a_rank_that_has_all_waits_for_the_others(of_both: list[list[Any]]) -> None:
    (seen, one, nbytes), (other_seen, other, other_nbytes) = of_both[0]
    assert (one, other) == ("network 0", "network 1")
    assert seen == other_seen, "progress is that of the group"
    assert seen[0] == [2, 40]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert (nbytes, other_nbytes) == (30, 30), "the bytes of the largest share"


def test_a_rank_that_fails_makes_the_others_fail_with_its_words(of_both: list[list[Any]]) -> None:
    for _, said, _ in of_both[1]:
        assert said.startswith("rank 1 can't load its share: ")
        assert "/secret" not in said


def test_ranks_are_alike_if_the_layers_of_all_are_of_the_same_kinds(
    of_both: list[list[Any]],
) -> None:
    assert of_both[2] == [True, True]
    assert of_both[3] == [False, False], "another window"
    assert of_both[4] == [False, False], "more layers"


def test_all_ranks_have_the_costs_of_the_oldest_chip(of_both: list[list[Any]]) -> None:
    one, both = ([matrix(512), matrix(1024)][:end] for end in (1, 2))
    for found, products in ((of_both[5], one), (of_both[6], both)):
        expected = StepCosts(products, Chip(13)).curve.least[:40].tolist()
        assert found == [expected, expected]
        assert expected != StepCosts(products, Chip(15)).curve.least[:40].tolist()


def matrix(outputs: int) -> Product:
    (product,) = products_of(nn.QuantizedLinear(512, outputs, bits=4))
    return product


@dataclass
class Heads:
    num_attention_heads: Any = 8
    num_key_value_heads: Any = 4


class Sharded(nn.Module):  # type: ignore[misc]
    model_type = "tiny"

    def __init__(self, args: Any = None) -> None:
        super().__init__()
        self.args = args
        self.groups: list[int] = []

    def shard(self, group: mx.distributed.Group) -> None:
        self.groups.append(group.size())


class Three:
    """A group that a test does not start; MLX itself gets none of it."""

    def size(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (Heads(), r"num_attention_heads \(8\) can't be split evenly over 3 ranks"),
        (Heads(6, 4), r"num_key_value_heads \(4\) can't be split"),
        (Heads(6, 3), None),
        (Heads(None, None), None),
        (None, None),
    ],
)
def test_heads_are_split_evenly_or_not_at_all(args: Any, said: str | None) -> None:
    share, model = Share(Three(), "tensor"), Sharded(args)  # type: ignore[arg-type]
    if said is None:
        share.cut(model)
        assert model.groups == [3]
        return
    with pytest.raises(ValueError, match=said):
        share.cut(model)
    assert model.groups == []
