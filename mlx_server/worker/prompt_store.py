"""The prompt store: cached prompts in memory and in files, and what rows keep there."""

from collections.abc import Callable, Iterable, Sequence

from mlx_server.prompt_files import PromptFolder
from mlx_server.requests import Tier
from mlx_server.worker.prefill.disk_tier import DiskTier
from mlx_server.worker.prefill.memory_tier import Cache, Key, MemoryTier, can_always_be_cut
from mlx_server.worker.row import Row


class PromptStore:
    """The prompts of all models, in two tiers."""

    def __init__(
        self,
        most_bytes: int,
        folder: PromptFolder | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """most_bytes: those in memory. folder: of the files; None: there are none. wake: called in
        other threads when `disk.step` has something to do."""
        self.memory = MemoryTier(most_bytes)
        self.disk = DiskTier(folder if most_bytes else None, self.memory, wake)

    def limit(self, max_bytes: int, *, busy: bool) -> None:
        """Limits the bytes in memory. busy: whether rows are running."""
        if max_bytes < self.memory.nbytes and not busy:
            self.disk.flush()
        self.memory.limit(max_bytes)

    def unloaded(self, model: str, *, busy: bool) -> None:
        if not busy:
            self.disk.flush(model)
        self.memory.unloaded((model,))
        self.disk.unloaded(model)

    def forget(self, key: Key) -> None:
        """Drops all prompts of this key, also from disk: their values may be invalid."""
        self.memory.forget(key)
        self.disk.forget(key)

    def clear(self) -> None:
        """Drops the prompts that are in the memory of a GPU that has failed."""
        self.memory.clear()
        self.disk.saver.clear()


FIRST = (1024, 2048)
"""The first places in a long prompt: one that parts early from another one computes at most half of
what they share again."""

SPACING = 4096
"""Distance of the others, doubled until there are at most MOST_SPACED of them."""

MOST_SPACED = 8

NEAREST = 32
"""The least distance of two places: fewer tokens cost less to compute again than a forward pass."""


def snapshot_places(branches: Sequence[int], length: int) -> tuple[int, ...]:
    """Returns the places in a prompt of `length` tokens at which its state is kept, in order.

    branches: the lengths at which other prompts are expected to differ from it.
    """
    spacing = SPACING
    while length // spacing > MOST_SPACED:
        spacing *= 2
    places: tuple[int, ...] = ()
    for place in (*sorted(branches), *FIRST, *range(spacing, length, spacing)):
        if place < length:
            places = _with_place(places, place)
    return places


def with_parting(places: tuple[int, ...], parting: int, known: int) -> tuple[int, ...]:
    """Returns the places with the length at which the prompt parts from one in the prompt cache,
    and one a little before it.

    A third prompt is likely to part there too: from there on, the texts of clients vary. Ids and
    times have some tokens in common by chance, so it may part a few tokens earlier. known: how much
    the store can restore."""
    is_served = any(0 <= parting - place < NEAREST for place in places)
    if is_served or parting - known < NEAREST:
        return places
    left = tuple(p for p in places if abs(p - parting) >= NEAREST)
    return _with_place(_with_place(left, parting), parting - NEAREST)


def _with_place(places: tuple[int, ...], place: int) -> tuple[int, ...]:
    """Adds a place. The shorter of two near places is kept, since it serves both: branches come in
    order."""
    is_apart = all(abs(place - other) >= NEAREST for other in places)
    return tuple(sorted((*places, place))) if place >= NEAREST and is_apart else places


def _reusable(row: Row, places: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({row.reusable(place) for place in places} - {0}))


class RowPrompts:
    """The prompt store as the rows of one model use it."""

    def __init__(self, store: PromptStore, layers: Cache) -> None:
        """layers: an empty cache of the model."""
        self._store, self._memory = store, store.memory
        self._needs_snapshots = not all(map(can_always_be_cut, layers))

    @property
    def can_be_cut(self) -> bool:
        """Whether all of a cache can be cut to any length, so that no state has to be kept."""
        return not self._needs_snapshots

    def add_places(self, row: Row) -> None:
        """Adds the lengths of the row's prompt at which its state is to be kept."""
        if self._needs_snapshots:
            length = len(row.request.prompt)
            row.snapshot_places = _reusable(row, snapshot_places(row.request.branches, length))

    def known(self, row: Row, tokens: list[int]) -> int:
        """Returns the length of the prefix that `fetch` would find."""
        if row.deterministic:
            return len(self._whole_pieces(row, tokens))
        return self._memory.known(row.prompt_key, tokens)

    def _whole_pieces(self, row: Row, tokens: list[int]) -> list[int]:
        """Returns the longest known prefix that a deterministic row may begin with."""
        tokens = tokens[: row.reusable(len(tokens))]
        return tokens[: row.reusable(self._memory.known(row.prompt_key, tokens))]

    def fetch(self, row: Row, tokens: list[int]) -> tuple[Cache | None, int]:
        """Returns the cache of the longest known prefix of `tokens`, and the prefix's length. The
        row begins with it, and holds no prompt any more."""
        tokens = self._whole_pieces(row, tokens) if row.deterministic else tokens
        fetched = self._memory.fetch(row.prompt_key, tokens)
        self._memory.release(row.number)
        return fetched

    def hold(self, row: Row, tokens: list[int]) -> None:
        """Keeps what `fetch` would find until the row begins."""
        self._memory.hold(row.number, row.prompt_key, tokens)

    def add_parting(self, row: Row, tokens: list[int], known: int) -> None:
        """Adds the length at which the row's prompt parts from a cached one to its snapshot places.

        known: the length that `fetch` returned. A cache that can always be cut has all of it."""
        if self._needs_snapshots:
            parting = self._memory.parting(row.prompt_key, tokens)
            row.snapshot_places = _reusable(row, with_parting(row.snapshot_places, parting, known))

    def wants(self, row: Row, tokens: list[int]) -> bool:
        is_reusable = row.reusable(len(tokens)) == len(tokens)
        return is_reusable and not row.failure and self._memory.wants(tokens)

    def store(
        self,
        row: Row,
        tokens: list[int],
        extracted: Callable[[], Cache],
        *,
        goes_on: bool = False,
        handed_over: bool = False,
    ) -> None:
        """Stores a row's cache if it is wanted. goes_on, handed_over: see `MemoryTier.store`.

        extracted: called only then, since it is costly and fails for an empty cache.
        """
        if self.wants(row, tokens) and not (goes_on and self._has_nearly_all(row, tokens)):
            # without a template's word, the same prompt may come again
            continued_from = row.request.continued_from or len(row.request.prompt) - 1
            self._memory.store(
                row.prompt_key,
                tokens,
                extracted(),
                continued_from=min(continued_from, len(tokens)),
                shared=row.request.shared,
                disk_length=len(tokens) if row.request.on_disk else 0,
                gives_way=row.tier is Tier.BATCH,
                goes_on=goes_on,
                handed_over=handed_over,
            )

    def _has_nearly_all(self, row: Row, tokens: list[int]) -> bool:
        """Whether another copy of the keys and values is worth less than computing the few tokens
        that it adds: the row stores them at its end."""
        if self._needs_snapshots or row.deterministic:
            return False
        return self.known(row, tokens) > max(0, len(tokens) - NEAREST)

    def store_snapshot(self, row: Row, tokens: list[int], extracted: Callable[[], Cache]) -> None:
        """Stores the state of a prompt that is still being computed, if it is wanted here. It is
        the last one of a deterministic prompt that may be used again."""
        if row.deterministic and len(tokens) == row.reusable(len(row.request.prompt)):
            self.store(row, tokens, extracted, goes_on=True)
        elif len(tokens) in row.snapshot_places and self.wants(row, tokens):
            shared, is_batch = row.request.shared, row.tier is Tier.BATCH
            cache = extracted()
            self._memory.store_snapshot(row.prompt_key, tokens, cache, shared, gives_way=is_batch)

    def forget(self, row: Row) -> None:
        """Drops all prompts that such rows use, since their values may be invalid."""
        self._store.forget(row.prompt_key)
