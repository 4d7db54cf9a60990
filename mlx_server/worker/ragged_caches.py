"""The caches of rows that don't get the same number of tokens in a pass, and of rows whose keys and
values are quantised, which mlx-lm can't batch.

mlx-lm's batches end their rows at the same column, so that taking tokens back from one row moves
the keys and values of all. Here each row begins at column 0 and has a length of its own, and taking
tokens back changes a number. Recurrent states have no columns: rows whose tokens are taken back get
the state before the pass again.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlx_server.engine.messages import STEP
from mlx_server.worker.mlx_lm_internals import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    create_attention_mask,
)
from mlx_server.worker.replay_model import ReplayCache

WINDOW_STEP = 64
"""The columns by which the caches of sliding windows grow; those of all tokens by STEP."""

SPARE = 32
"""The columns that a sliding window has beyond its own before older ones are dropped."""

GROUP_SIZES = (64, 32)
"""The number of values that may share a scale; the first that divides the width of keys and of
values."""

Side = Any
"""Keys or values, [rows, heads, columns, width]: an array, or the packed values, scales and biases
of a quantised one; None if no row has any token."""


def leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """Yields the caches, and in the place of lists their entries."""
    for cache in caches:
        yield from leaves(cache.caches) if isinstance(cache, CacheList) else (cache,)


class RaggedRows(BatchKVCache):
    keys: Side
    values: Side
    offset: mx.array
    _lacking: Sequence[int] = ()

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
        if self.keys is None:
            self.keys, self.values = (_fitted(self._stored(x), 0) for x in (keys, values))
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

    def trim(self, n: int) -> int:
        self.take_back([n] * len(self.columns))
        return n

    def prepare(self, *, right_padding: Sequence[int] = (), **_: Any) -> None:
        self._lacking = right_padding

    def finalize(self) -> None:
        """Takes back what rows have been padded by at the right since `prepare`."""
        self.take_back(self._lacking)
        self._lacking = ()

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
        if self.keys is not None:
            self.keys, self.values = (
                tree_map(lambda x: x[mx.array(keep), :, :longest], side)
                for side in (self.keys, self.values)
            )
        self.offset = self.offset[mx.array(keep)]

    def extend(self, other: Self) -> None:
        self.keys, self.values = (
            _joined(sides, [self.columns, other.columns])
            for sides in ((self.keys, other.keys), (self.values, other.values))
        )
        self.offset = mx.concatenate([self.offset, other.offset])
        self.columns += other.columns

    def extract(self, index: int) -> Any:
        end = self.columns[index]
        if self.keys is None:
            return self._row(None, None, end)
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
        return sum(x.nbytes for _, x in tree_flatten((self.keys, self.values)) if x is not None)


class QuantizedRow(QuantizedKVCache):
    """The cache of one row."""

    keys: Side
    values: Side

    def __init__(self, bits: int) -> None:
        super().__init__(group_size=GROUP_SIZES[0], bits=bits)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        self.group_size = group_size(keys, values)
        fetched: tuple[Side, Side] = super().update_and_fetch(keys, values)
        return fetched

    def size(self) -> int:
        return int(self.offset)

    @classmethod
    def merge(cls, caches: Sequence[Self]) -> "QuantizedRows":
        columns = [cache.size() for cache in caches]
        each = [[count] for count in columns]
        keys, values = (
            _joined(sides, each)
            for sides in zip(*((c.keys, c.values) for c in caches), strict=True)
        )
        filled = next((cache for cache in caches if cache.keys is not None), caches[0])
        rows = QuantizedRows(keys, values, columns, mx.array(columns))
        rows.bits, rows.group_size = filled.bits, filled.group_size
        return rows


class QuantizedRows(RaggedRows):
    bits: int
    group_size: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        self.group_size = group_size(keys, values)
        return super().update_and_fetch(keys, values)

    def _stored(self, new: mx.array) -> Side:
        return mx.quantize(new, group_size=self.group_size, bits=self.bits)

    def _row(self, keys: Side, values: Side, length: int) -> QuantizedRow:
        row = QuantizedRow(self.bits)
        row.keys, row.values, row.offset = keys, values, length
        row.group_size = self.group_size
        return row


def group_size(keys: mx.array, values: mx.array) -> int:
    widths = keys.shape[-1], values.shape[-1]
    for size in GROUP_SIZES:
        if all(width % size == 0 for width in widths):
            return size
    raise ValueError(
        f"keys and values of the widths {widths} can't be kept in fewer bits: the widths are no "
        f"multiples of {GROUP_SIZES[-1]}"
    )


def _joined(sides: Sequence[Side], columns: Sequence[Sequence[int]]) -> Side:
    """Joins the rows of several caches. columns: of each row of each."""
    filled = next((side for side in sides if side is not None), None)
    if filled is None:
        return None
    longest = max(map(max, columns))

    def whole(side: Side, rows: int) -> Side:
        if side is None:
            shape = rows, *tree_flatten(filled)[0][1].shape[1:2], 0
            side = tree_map(lambda x: mx.zeros((*shape, x.shape[3]), x.dtype), filled)
        return _fitted(side, longest)

    parts = [whole(side, len(each)) for side, each in zip(sides, columns, strict=True)]
    return tree_map(lambda *rows: mx.concatenate(rows), *parts)


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
    if type(cache) not in PADDED or cache.keys is None:
        return cache
    if isinstance(cache, BatchRotatingKVCache):
        cache._temporal_order()
    end = cache._idx
    padding = [max(0, left) for left in cast(list[int], cache.left_padding.tolist())]
    keys, values = (_until(side, end) for side in (cache.keys, cache.values))
    if any(padding):
        keys, values = (_moved(side, padding, end) for side in (keys, values))
    columns = [end - left for left in padding]
    return RaggedRows(keys, values, columns, cache.offset, getattr(cache, "max_size", None))


PADDED = (BatchKVCache, BatchRotatingKVCache)
KINDS = (*PADDED, ArraysCache, ReplayCache, RaggedRows, QuantizedRows)


def is_padded(caches: Iterable[Any]) -> bool:
    """Whether rows are padded to end at the same column."""
    return any(type(leaf) in PADDED for leaf in leaves(caches))


def can_take_back(caches: Iterable[Any]) -> bool:
    """Whether these caches of a decoding batch can give tokens back. Those of a model whose rows
    are computed alone can't: what it makes of several tokens is not known."""
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
