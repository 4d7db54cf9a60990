"""The part of a model that a process has: all of it, or the share of one rank of a group."""

import logging
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
import msgspec

from mlx_server.engine.worker_arguments import Mode, RankGroup
from mlx_server.errors import public_message
from mlx_server.worker.costs import RankCosts, StepCosts, products_of, step_costs, this_chip
from mlx_server.worker.kernels import Chip, Product
from mlx_server.worker.kv_caches import make_caches
from mlx_server.worker.weights import Reading, arrays

log = logging.getLogger("mlx_server.engine")

T = TypeVar("T")


class WholeModel:
    is_one_of_several = False
    """Whether other processes have other shares, and have to fail together with this one."""

    def cut(self, model: nn.Module) -> None:
        """Reduces a model whose weights are not read yet to this process's share."""

    def together(self, reading: Reading) -> Reading:
        """Reads the weights until every process of the model has its share."""
        return (yield from reading)

    def nbytes(self, model: nn.Module) -> int:
        """Returns the bytes of the weights, on the machine that has most of them."""
        return sum(array.nbytes for array in arrays(model))

    def step_costs(self, model: nn.Module) -> StepCosts:
        return step_costs(model)

    def is_alike(self, model: nn.Module) -> bool:
        """Whether each process has layers of the same kinds: only then would all keep the same
        prompts, and take the same tokens back."""
        return True


WHOLE = WholeModel()


class _Progress(msgspec.Struct):
    done: int
    total: int
    has_all: bool
    failure: str


class _RankFacts(msgspec.Struct):
    layers: list[tuple[str, int]]
    """The kind of each layer's cache, and its window."""
    products: list[Product]
    chip: Chip | None


class Share(WholeModel):
    """One rank's share. Loads go on in step: a rank that has all waits for the others, and a rank
    that fails makes the others fail too."""

    is_one_of_several = True

    def __init__(self, group: mx.distributed.Group, mode: Mode) -> None:
        self._group, self._mode = group, mode
        self._largest = 0
        """The bytes of the largest share of the model that was last loaded."""

    def cut(self, model: nn.Module) -> None:
        if self._mode == "pipeline":
            if (pipeline := getattr(getattr(model, "model", None), "pipeline", None)) is None:
                raise ValueError(self._unsupported(model, "tensor"))
            pipeline(self._group)
            return
        if not hasattr(model, "shard"):
            raise ValueError(self._unsupported(model, "pipeline"))
        _check_heads(model, self._group.size())
        model.shard(self._group)

    def _unsupported(self, model: nn.Module, other: Mode) -> str:
        kind = getattr(model, "model_type", "this model")
        return (
            f"mlx-lm can't split {kind} in mode {self._mode}. Set `mode: {other}` under "
            "`distributed`, or serve it on one machine."
        )

    def together(self, reading: Reading) -> Reading:
        mine, network = _Progress(0, 0, has_all=False, failure=""), None
        while True:
            if not mine.has_all:
                try:
                    mine.done, mine.total = next(reading)
                except StopIteration as end:
                    network, mine.has_all = end.value, True
                except Exception as error:
                    log.exception("rank %d can't load its share", self._group.rank())
                    mine.failure = public_message(error)
            ranks = self._of_all(mine)
            for rank, each in enumerate(ranks):
                if each.failure:
                    raise ValueError(f"rank {rank} can't load its share: {each.failure}")
            if all(each.has_all for each in ranks):
                self._largest = max(each.total for each in ranks)
                return network
            yield sum(each.done for each in ranks), sum(each.total for each in ranks)

    def nbytes(self, model: nn.Module) -> int:
        return self._largest

    def step_costs(self, model: nn.Module) -> StepCosts:
        """Returns what the oldest chip would take, so that all ranks decide alike. In a pipeline a
        pass goes through the layers of all ranks, else they compute their shares together."""
        ranks = self._facts(model)
        passed = ranks if self._mode == "pipeline" else ranks[:1]
        chips = [rank.chip for rank in ranks if rank.chip]
        oldest = min(chips, key=lambda chip: chip.generation, default=None)
        chip = oldest if len(chips) == len(ranks) else None
        costs = RankCosts([product for rank in passed for product in rank.products], chip)
        costs.is_alike = self.is_alike(model)
        return costs

    def is_alike(self, model: nn.Module) -> bool:
        """In a pipeline a rank may have other layers, or more of them."""
        first, *others = (rank.layers for rank in self._facts(model))
        return all(layers == first for layers in others)

    def _facts(self, model: nn.Module) -> tuple[_RankFacts, ...]:
        """Returns those of each rank. They are exchanged once, when the model is loaded."""
        if not hasattr(model, "facts_of_ranks"):
            layers = [
                (type(each).__name__, getattr(each, "max_size", 0)) for each in make_caches(model)
            ]
            mine = _RankFacts(layers, products_of(model), this_chip())
            model.facts_of_ranks = tuple(self._of_all(mine))  # a list would hold parameters
        return cast(tuple[_RankFacts, ...], model.facts_of_ranks)

    def _of_all(self, mine: T) -> list[T]:
        """Returns what each rank has, in their order; `mine` is that of this one."""
        message = msgspec.msgpack.encode(mine)
        sizes = self._all_gather(mx.array([len(message)], mx.int32))
        padded = message.ljust(max(int(size) for (size,) in sizes), b"\0")
        every = self._all_gather(mx.array(list(padded), mx.uint8))
        messages = (bytes(each)[: size[0]] for each, size in zip(every, sizes, strict=True))
        return [msgspec.msgpack.decode(each, type=type(mine)) for each in messages]

    def _all_gather(self, mine: mx.array) -> Any:
        """Returns the values of all ranks: [ranks, values]."""
        return mx.distributed.all_gather(mine[None], group=self._group, stream=mx.cpu).tolist()


def _check_heads(model: nn.Module, ranks: int) -> None:
    """mlx-lm itself would fail later, or give a rank no heads at all."""
    arguments = getattr(model, "args", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(arguments, name, None)
        if isinstance(heads, int) and heads % ranks:
            raise ValueError(
                f"its {name} ({heads}) can't be split evenly over {ranks} ranks. List another "
                "number of hosts, or set `mode: pipeline` under `distributed` if it has one."
            )


def joined_share(group: RankGroup, rank: int) -> Share:
    """Returns the rank's share when all ranks have connected. Raises RuntimeError if they can't."""
    os.environ.update(group.backend_variables() | {"MLX_RANK": str(rank)})
    with TemporaryDirectory() as folder:
        for variable, text in group.backend_files().items():
            file = Path(folder) / variable
            file.write_text(text, "utf-8")
            os.environ[variable] = str(file)
        backend = "ring" if group.backend == "ring" else "jaccl"
        return Share(mx.distributed.init(strict=True, backend=backend), group.mode)
