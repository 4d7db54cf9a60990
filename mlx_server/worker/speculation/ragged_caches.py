"""The caches of decoding rows that don't get the same number of tokens in a pass.

mlx-lm's batches end their rows at the same column, so that taking tokens back from one row moves
the keys and values of all. Here each row begins at column 0 and has a length of its own, and taking
tokens back changes a number. Recurrent states have no columns: rows whose tokens are taken back get
the state before the pass again.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlx_server.worker.kv_caches import QuantizedRow, QuantizedRows, leaves
from mlx_server.worker.mlx_lm_internals import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    create_attention_mask,
)
from mlx_server.worker.replay_model import ReplayCache

STEP, WINDOW_STEP = 256, 64
"""The columns by which the caches grow: those of all tokens, and those of a sliding window."""

SPARE = 32
"""The columns that a sliding window has beyond its own before older ones are dropped."""

Side = Any
"""Keys or values, [rows, heads, columns, width]: an array, or the three of a quantised one."""


class RaggedRows(BatchKVCache):
    keys: Side
    values: Side
    offset: mx.array

    def __init__(
        self,
        keys: Side,
        values: Side,
        columns: Sequence[int],
        offset: mx.array,
        window: int | None = None,
    ) -> None:
        """columns: of each row. offset: the tokens of each row, which may be more than its columns.
        window: the tokens that a row can see; None: all."""
        self.keys, self.values = keys, values
        self.columns, self.offset = list(columns), offset
        self.left_padding = mx.zeros(len(self.columns), mx.int32)
        self.window = window
        self._of_pass: tuple[Side, Side] | None = None
        """The keys and values of the latest pass, if old ones were dropped since: further layers
        may read them, with the same mask."""

    @property
    def _idx(self) -> int:
        return max(self.columns)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        width, longest = keys.shape[2], max(self.columns)
        self._of_pass = None
        if longest + width > int(tree_flatten(self.keys)[0][1].shape[2]):
            step = STEP if self.window is None else WINDOW_STEP
            room = longest + -(-width // step) * step
            self.keys, self.values = _fitted(self.keys, room), _fitted(self.values, room)
        self._write(self.keys, self._stored(keys))
        self._write(self.values, self._stored(values))
        self.columns = [count + width for count in self.columns]
        self.offset = self.offset + width
        fetched = self.keys_and_values()
        if self.window is not None and max(self.columns) >= self.window + width + SPARE:
            self._drop_old(self.window + width)
            self._of_pass = fetched
        return fetched

    def _stored(self, new: mx.array) -> Side:
        return new

    def _write(self, stored: Side, new: Side) -> None:
        width = tree_flatten(new)[0][1].shape[2]
        first, alike = self.columns[0], len(set(self.columns)) == 1
        rows = mx.arange(len(self.columns))[:, None]
        places = mx.array(self.columns)[:, None] + mx.arange(width)
        for (_, whole), (_, part) in zip(tree_flatten(stored), tree_flatten(new), strict=True):
            if alike:
                whole[..., first : first + width, :] = part
            else:
                whole[rows, :, places] = part.transpose(0, 2, 1, 3)

    def _drop_old(self, most: int) -> None:
        """Drops all columns of each row but the latest ones. The next mask has to be for what is
        kept, so it is done after a pass."""
        old = [max(0, count - most) for count in self.columns]
        self.keys, self.values = (_moved(side, old, most) for side in (self.keys, self.values))
        self.columns = [count - gone for count, gone in zip(self.columns, old, strict=True)]

    def keys_and_values(self) -> tuple[Side, Side]:
        longest = max(self.columns)
        return self._of_pass or (_until(self.keys, longest), _until(self.values, longest))

    def take_back(self, counts: Sequence[int]) -> None:
        """Takes back the latest tokens, so many of each row."""
        if any(counts):
            self.columns = [n - gone for n, gone in zip(self.columns, counts, strict=True)]
            self.offset = self.offset - mx.array([*counts])

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Any:
        windows = [window for window in (window_size, self.window) if window]
        if len(self.columns) == 1 and not windows:  # see _mask_of_rows in kv_caches
            return create_attention_mask(N, self.columns[0], return_array, None)
        last = mx.array(self.columns)[:, None, None, None] + mx.arange(N)[:, None]
        columns = mx.arange(max(self.columns) + N)
        mask = columns <= last
        return mask & (columns > last - min(windows)) if windows else mask

    def filter(self, batch_indices: Any) -> None:
        keep = [int(at) for at in batch_indices]
        self.columns = [self.columns[at] for at in keep]
        longest = max(self.columns)
        self.keys, self.values = (
            tree_map(lambda x: x[mx.array(keep), :, :longest], side)
            for side in (self.keys, self.values)
        )
        self.offset = self.offset[mx.array(keep)]
        self.left_padding = mx.zeros(len(keep), mx.int32)

    def extend(self, other: Self) -> None:
        longest = max(*self.columns, *other.columns)
        self.keys, self.values = (
            tree_map(lambda *both: mx.concatenate(both), *(_fitted(x, longest) for x in sides))
            for sides in ((self.keys, other.keys), (self.values, other.values))
        )
        self.offset = mx.concatenate([self.offset, other.offset])
        self.columns += other.columns
        self.left_padding = mx.zeros(len(self.columns), mx.int32)

    def extract(self, index: int) -> Any:
        end = self.columns[index]
        begin = 0 if self.window is None else max(0, end - self.window)
        keys, values = (
            tree_map(lambda x: mx.contiguous(x[index : index + 1, :, begin:end]), side)
            for side in (self.keys, self.values)
        )
        if self.window is None:
            return self._row(keys, values, end)
        row = RotatingKVCache(self.window)
        row.keys, row.values, row._idx = keys, values, end - begin
        row.offset = cast(list[int], self.offset.tolist())[index]
        return row

    def _row(self, keys: Side, values: Side, length: int) -> Any:
        row = KVCache()
        row.keys, row.values, row.offset = keys, values, length
        return row

    @property
    def state(self) -> list[Any]:
        return [self.keys, self.values, self.offset]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for _, x in tree_flatten((self.keys, self.values)))


class QuantizedRaggedRows(RaggedRows):
    def __init__(self, *how: Any, bits: int, group_size: int) -> None:
        super().__init__(*how)
        self.bits, self.group_size = bits, group_size

    def _stored(self, new: mx.array) -> Side:
        return mx.quantize(new, group_size=self.group_size, bits=self.bits)

    def _row(self, keys: Side, values: Side, length: int) -> QuantizedRow:
        row = QuantizedRow(self.bits)
        row.keys, row.values, row.offset = keys, values, length
        row.group_size = self.group_size
        return row


def _fitted(side: Side, columns: int) -> Side:
    """Returns so many columns of each row."""

    def fitted(x: mx.array) -> mx.array:
        x = x[:, :, :columns]
        return mx.pad(x, [(0, 0), (0, 0), (0, columns - x.shape[2]), (0, 0)])

    return tree_map(fitted, side)


def _until(side: Side, end: int) -> Side:
    return tree_map(lambda x: x[..., :end, :], side)


def _moved(side: Side, old: Sequence[int], columns: int) -> Side:
    """Returns so many columns of each row, without the `old` ones at its beginning."""
    places = (mx.array([*old])[:, None] + mx.arange(columns))[:, None, :, None]

    def moved(x: mx.array) -> mx.array:
        return mx.take_along_axis(x, mx.minimum(places, x.shape[2] - 1), axis=2)

    return tree_map(moved, side)


def ragged(cache: Any) -> Any:
    """Returns a decoding batch's cache as one whose rows have lengths of their own."""
    if isinstance(cache, CacheList):
        return CacheList(*map(ragged, cache.caches))
    kinds = (BatchKVCache, QuantizedRows, BatchRotatingKVCache)
    if type(cache) not in kinds or cache.keys is None:
        return cache
    if isinstance(cache, BatchRotatingKVCache):
        cache._temporal_order()
    end = cache._idx
    padding = [max(0, left) for left in cast(list[int], cache.left_padding.tolist())]
    keys, values = (_until(side, end) for side in (cache.keys, cache.values))
    if any(padding):
        keys, values = (_moved(side, padding, end) for side in (keys, values))
    how = keys, values, [end - left for left in padding], cache.offset
    if isinstance(cache, QuantizedRows):
        return QuantizedRaggedRows(*how, bits=cache.bits, group_size=cache.group_size)
    return RaggedRows(*how, getattr(cache, "max_size", None))


KINDS = (
    *(BatchKVCache, QuantizedRows, BatchRotatingKVCache, ArraysCache, ReplayCache),
    *(RaggedRows, QuantizedRaggedRows),
)


def can_take_back(caches: Iterable[Any]) -> bool:
    """Whether these caches of a decoding batch can give tokens back. Those of a model whose rows
    are computed alone can't: what it makes of several tokens is known to nobody."""
    return all(type(leaf) in KINDS for leaf in leaves(caches))


class RecurrentStates:
    """The recurrent states of a batch before a pass, by reference."""

    def __init__(self, caches: Iterable[Any], lengths: Sequence[int]) -> None:
        """lengths: of each row's input, which is padded at the right."""
        self._before = [
            (leaf, list(leaf.cache)) for leaf in leaves(caches) if isinstance(leaf, ArraysCache)
        ]
        is_padded = min(lengths) < max(lengths)
        for leaf, _ in self._before:
            leaf.left_padding = None
            leaf.lengths = mx.array([*lengths]) if is_padded else None

    def __bool__(self) -> bool:
        return bool(self._before)

    def finish(self, kept: Sequence[bool]) -> None:
        """Gives the rows whose input is not kept the states before it."""
        for leaf, before in self._before:
            leaf.finalize()
            if not all(kept):
                pairs = zip(leaf.cache, before, strict=True)
                leaf.cache = [_either(new, old, mx.array([*kept])) for new, old in pairs]


def _either(new: mx.array | None, old: mx.array | None, kept: mx.array) -> mx.array | None:
    if new is None:
        return None
    kept = kept.reshape(-1, *[1] * (new.ndim - 1))
    return mx.where(kept, new, mx.zeros_like(new) if old is None else old)


def take_back(caches: Iterable[Any], counts: Sequence[int]) -> None:
    """Takes back the latest tokens of each row, but from recurrent states."""
    for leaf in leaves(caches):
        if isinstance(leaf, RaggedRows | ReplayCache):
            leaf.take_back(counts)
