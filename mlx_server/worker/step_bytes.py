"""The bytes that a step reads, and the groups of rows for which it reads the fewest.

A batch pads its rows to the longest. MLX's attention reads the padding too: its kernel for long
contexts loads keys and values before it looks at the mask. Rows in another batch have less padding,
and read the weights once more.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import mlx.nn as nn

from mlx_server.worker.mlx_lm_internals import (
    BatchKVCache,
    CacheList,
    QuantizedSwitchLinear,
    SwitchLinear,
)
from mlx_server.worker.weights import arrays

LAUNCH = 1 << 30
"""The bytes that a Mac reads in the time that a step needs besides reading, some milliseconds."""

USED_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
"""The names that mlx-lm's models give the number of experts for a token."""


class StepBytes:
    """What a step of a model reads."""

    def __init__(self, model: nn.Module) -> None:
        experts = [
            module
            for module in model.modules()
            if isinstance(module, SwitchLinear | QuantizedSwitchLinear)
        ]
        self._experts = sum(array.nbytes for module in experts for array in arrays(module))
        self._others = sum(array.nbytes for array in arrays(model)) - self._experts
        count = max((module.weight.shape[0] for module in experts), default=1)
        self._unused = 1 - min(1.0, _used_experts(model, count) / count)
        """The share of the experts that a token does not use."""

    def weights(self, rows: int) -> float:
        return LAUNCH + self._others + self._experts * (1 - self._unused**rows)

    def token(self, caches: Iterable[Any]) -> float:
        """Returns the bytes of a token in those caches of a batch that keep all tokens."""
        return sum(map(_token_bytes, _leaves(caches)))


class OneGroup(StepBytes):
    """Keeps all rows in one batch, unless padding takes too much memory."""

    def token(self, caches: Iterable[Any]) -> float:
        return 0.0


def _leaves(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        yield from _leaves(cache.caches) if isinstance(cache, CacheList) else (cache,)


def _token_bytes(cache: Any) -> float:
    if not isinstance(cache, BatchKVCache) or cache.keys is None:
        return 0.0
    keys = cache.keys[0] if isinstance(cache.keys, tuple) else cache.keys
    rows, _, tokens, _ = keys.shape
    return float(cache.nbytes / (rows * tokens))


def _used_experts(model: nn.Module, count: int) -> int:
    arguments = _fields(getattr(model, "args", None))
    texts = [arguments, _fields(arguments.get("text_config"))]
    found = [int(text[name]) for text in texts for name in USED_EXPERTS if text.get(name)]
    return found[0] if found else count


def _fields(arguments: Any) -> Mapping[str, Any]:
    """Returns the arguments of a model, or of a part of it: mlx-lm's models keep both kinds."""
    if isinstance(arguments, Mapping):
        return arguments
    return getattr(arguments, "__dict__", {})


def cheapest_groups(
    lengths: Sequence[int], read: Callable[[int, int], float]
) -> tuple[float, list[list[int]]]:
    """Returns what the groups of rows read for which that is the least, and their rows by index.

    lengths: of each row. read: what a group reads, by its rows and the length of the longest. The
    rows of a group have neighbouring lengths: any others would be padded more.
    """
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    best: list[tuple[float, list[list[int]]]] = [(0.0, [])]
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        begin = min(range(end), key=lambda begin: best[begin][0] + read(end - begin, longest))
        before, groups = best[begin]
        best.append((before + read(end - begin, longest), [*groups, order[begin:end]]))
    return best[-1]


def padding(lengths: Sequence[int]) -> int:
    """Returns the tokens by which a group of rows of such lengths is padded."""
    return len(lengths) * max(lengths, default=0) - sum(lengths)


def padded_less(
    groups: list[list[int]], lengths: Sequence[int], most: int | None
) -> list[list[int]]:
    """Returns the groups, split until they are padded by `most` tokens together.

    groups: rows by index, each with neighbouring lengths in ascending order.
    """

    def padded(group: list[int]) -> int:
        return padding([lengths[row] for row in group])

    groups = list(groups)
    while most is not None and sum(map(padded, groups)) > most:
        worst = max(groups, key=padded)
        halves = [(worst[:at], worst[at:]) for at in range(1, len(worst))]
        groups.remove(worst)
        groups += min(halves, key=lambda both: sum(map(padded, both)))
    return groups
