"""The prompt cache as the rows of one model use it, and where the states of a prompt are kept."""

from collections.abc import Callable, Iterator, Sequence

from mlx_server.engine.messages import ComputeAhead, Generate
from mlx_server.worker.lora_layers import NO_ADAPTER, RowAdapter
from mlx_server.worker.prefill.prompt_cache import Cache, PromptCache, cache_key, can_always_be_cut
from mlx_server.worker.row import Row, row_adapter_of

FIRST = 1024
"""The first place in a long prompt. The next ones double until they are SPACING apart, so that a
prompt which parts early from another one computes at most half of what they share again."""

SPACING = 4096
"""Distance of the places in a long prompt, doubled until there are at most MOST_SPACED of them."""

MOST_SPACED = 8

NEAREST = 32
"""The least distance of two places: fewer tokens cost less to compute again than a forward pass."""


def snapshot_places(branches: Sequence[int], length: int) -> tuple[int, ...]:
    """Returns the places in a prompt of `length` tokens, in order.

    branches: the lengths at which other prompts are expected to differ from it.
    """
    spacing = SPACING
    while length // spacing > MOST_SPACED:
        spacing *= 2
    places: tuple[int, ...] = ()
    for place in (*sorted(branches), *_doubling(), *range(spacing, length, spacing)):
        if place < length:
            places = _with_place(places, place)
    return places


def with_parting(places: tuple[int, ...], parting: int, known: int) -> tuple[int, ...]:
    """Returns the places with the length at which the prompt parts from one in the prompt cache,
    and one a little before it.

    A third prompt is likely to part there too: from there on, the texts of clients vary. Ids and
    times have some tokens in common by chance, so it may part a few tokens earlier. known: how much
    the prompt cache can restore."""
    is_served = any(0 <= parting - place < NEAREST for place in places)
    if is_served or parting - known < NEAREST:
        return places
    left = tuple(p for p in places if abs(p - parting) >= NEAREST)
    return _with_place(_with_place(left, parting), parting - NEAREST)


def _doubling() -> Iterator[int]:
    place = FIRST
    while place < SPACING:
        yield place
        place *= 2


def _with_place(places: tuple[int, ...], place: int) -> tuple[int, ...]:
    """Adds a place. The shorter of two near places is kept, since it serves both: branches come in
    order."""
    is_apart = all(abs(place - other) >= NEAREST for other in places)
    return tuple(sorted((*places, place))) if place >= NEAREST and is_apart else places


class RowCache:
    def __init__(
        self,
        prompts: PromptCache,
        model: str,
        layers: Cache,
        on_invalid: Callable[[str], None],
    ) -> None:
        """layers: an empty cache of the model. on_invalid: called with the key of cached prompts
        whose values may be invalid."""
        self._prompts = prompts
        self._model = model
        self._needs_snapshots = not all(map(can_always_be_cut, layers))
        self._on_invalid = on_invalid

    def places(self, request: Generate) -> tuple[int, ...]:
        """Returns the lengths of the prompt at which its state is to be kept."""
        if not self._needs_snapshots:
            return ()
        return snapshot_places(request.branches, len(request.prompt))

    def known(self, row: Row, tokens: list[int]) -> int:
        """Returns the length of the prefix that `fetch` would find."""
        return self._prompts.known(self._key(row), tokens)

    def fetch(self, row: Row, tokens: list[int]) -> tuple[Cache | None, int]:
        """Returns the cache of the longest known prefix of `tokens`, and the prefix's length. The
        row begins with it, and holds no prompt any more."""
        fetched = self._prompts.fetch(self._key(row), tokens)
        self._prompts.release(row.number)
        return fetched

    def hold(self, row: Row, tokens: list[int]) -> None:
        """Keeps what `fetch` would find until the row begins."""
        self._prompts.hold(row.number, self._key(row), tokens)

    def add_parting(self, row: Row, tokens: list[int], known: int) -> None:
        """Adds the length at which the row's prompt parts from a cached one to its snapshot places.

        known: the length that `fetch` returned. A cache that can always be cut has all of it."""
        if self._needs_snapshots:
            parting = self._prompts.parting(self._key(row), tokens)
            row.snapshot_places = with_parting(row.snapshot_places, parting, known)

    def wants(self, row: Row, tokens: list[int]) -> bool:
        return not row.failure and self._prompts.wants(tokens)

    def store(
        self, row: Row, tokens: list[int], extracted: Callable[[], Cache], **how: bool
    ) -> None:
        """Stores a row's cache if it is wanted. how: see `PromptCache.store`.

        extracted: called only then, since it is costly and fails for an empty cache.
        """
        if self.wants(row, tokens):
            start, on_disk = row.continued_from, len(tokens) if row.on_disk else 0
            self._prompts.store(
                self._key(row),
                tokens,
                extracted(),
                continued_from=start,
                shared=row.shared,
                disk_length=on_disk,
                **how,
            )

    def store_snapshot(self, row: Row, tokens: list[int], extracted: Callable[[], Cache]) -> None:
        """Stores the state of a prompt that is still being computed, if it is wanted here."""
        if len(tokens) in row.snapshot_places and self.wants(row, tokens):
            self._prompts.store_snapshot(self._key(row), tokens, extracted(), row.shared)

    def forget(self, row: Row) -> None:
        """Drops all prompts that such rows use, since their values may be invalid."""
        key = self._key(row)
        self._prompts.forget(key)
        self._on_invalid(key)

    def _key(self, row: Row) -> str:
        return prompt_key(self._model, row.row_adapter, row.cache_scope)


def prompt_key(model: str, row_adapter: RowAdapter, scope: str) -> str:
    """Returns the key under which the prompt cache has the prompts of such rows."""
    if not scope:
        own = () if row_adapter == NO_ADAPTER else row_adapter
        return cache_key(model, *own)
    return cache_key(model, *row_adapter, scope)


def prompt_key_of(command: Generate | ComputeAhead) -> str:
    """Returns the key under which the prompt cache has the prompts of such commands."""
    return prompt_key(command.model, row_adapter_of(command), command.cache_scope)
