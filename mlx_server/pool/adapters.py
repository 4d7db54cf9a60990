"""LoRA adapters in the engine's memory: loaded when first used, leased while rows use them.

Those that are idle are like the prompt cache: they stay while nobody else wants their memory, and
the least recently used go first. What is in use is a part of its request's lease.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mlx_server.engine.client import EngineClient
from mlx_server.errors import AdapterInvalid, AdapterNotFound, Unavailable
from mlx_server.lora.catalog import AdapterCatalog, AdapterSpec, stamp_of

log = logging.getLogger("mlx_server.pool")


@dataclass(frozen=True)
class LeasedAdapter:
    """One that a request may use."""

    spec: AdapterSpec
    pinned: bool = False
    """Never dropped to make room."""
    by_client: bool = False
    """A client added it, and may have removed it when its request is served."""


@dataclass
class _LoadedAdapter:
    adapter: LeasedAdapter
    loading: asyncio.Task[int]
    """Bytes, once it is there."""
    nbytes: int
    users: dict[asyncio.Future[None], LeasedAdapter] = field(default_factory=dict)
    """Each lease, done when it ends, and the adapter as its request named it: two names may have
    the same weights."""
    last_used: float = 0.0

    @property
    def leases(self) -> int:
        return len(self.users)

    @property
    def gives_way(self) -> bool:
        return not self.leases and not self.adapter.pinned

    @property
    def staying(self) -> int:
        """Bytes that no lease has reserved: weights may be wider in memory than in their file."""
        if self.adapter.pinned:
            return self.nbytes
        return max(0, self.nbytes - self.leases * self.adapter.spec.nbytes) if self.leases else 0

    def used_as(self, name: str) -> list[asyncio.Future[None]]:
        return [lease for lease, adapter in self.users.items() if adapter.spec.name == name]


def find(catalog: AdapterCatalog, asked: str, allowed: Sequence[Path]) -> LeasedAdapter:
    """By name, or a folder inside of an allowed one. Raises AdapterNotFound or AdapterInvalid."""
    if "/" in asked:
        spec, place = catalog.find_folder(allowed_folder(asked, allowed))
    else:  # the name is looked up once: it may be removed at any time
        place = catalog.location(asked)
        spec = catalog.read(asked, place)
    return LeasedAdapter(spec, place.pinned, place.by_client)


def allowed_folder(path: str, allowed: Sequence[Path]) -> Path:
    # a path can't have a NUL
    folder = None if "\0" in path else Path(path).resolve()
    if not folder or not any(folder.is_relative_to(place.resolve()) for place in allowed):
        raise AdapterNotFound(
            f"{path[:200]!r} is no adapter here. Name one that `mlx-server adapters` shows, or let "
            "its owner add the folder to `adapter_dirs` under `server` in models.yaml.",
            param="adapter",
        )
    return folder


class AdapterPool:
    def __init__(self, engine: Callable[[], EngineClient], changed: Callable[[], None]) -> None:
        """changed: called whenever what is idle or staying has."""
        self._engine = engine
        self._changed = changed
        self._adapters: dict[tuple[str, str], _LoadedAdapter] = {}
        """By model and digest."""
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def idle_bytes(self) -> int:
        """Of those that give way."""
        return sum(held.nbytes for held in self._adapters.values() if held.gives_way)

    def staying_bytes(self, model: str) -> int:
        """Of those that do not give way, beside what their leases have reserved."""
        return sum(held.staying for (id, _), held in self._adapters.items() if id == model)

    def of(self, model: str) -> list[tuple[str, int, int]]:
        """Name, leases and bytes of those that are loaded."""
        found = [held for (id, _), held in self._adapters.items() if id == model]
        return [(held.adapter.spec.name, held.leases, held.nbytes) for held in found]

    @asynccontextmanager
    async def lease(self, model: str, adapter: LeasedAdapter) -> AsyncIterator[None]:
        """In the engine until the block is left. The model has to be leased around it."""
        key = model, adapter.spec.digest
        held = self._adapters.get(key)
        if held is None:
            loading = asyncio.create_task(self._load(model, adapter.spec))
            held = self._adapters[key] = _LoadedAdapter(adapter, loading, adapter.spec.nbytes)
            loading.add_done_callback(partial(self._loaded, key, held))
        lease: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        held.users[lease] = adapter
        self._changed()
        try:
            await asyncio.shield(held.loading)
            yield
        finally:
            held.users.pop(lease)
            held.last_used = asyncio.get_running_loop().time()
            _end(lease)
            self._changed()

    def _loaded(
        self, key: tuple[str, str], held: _LoadedAdapter, loading: asyncio.Task[int]
    ) -> None:
        """Whether or not somebody still waits for it."""
        if not loading.cancelled() and not loading.exception():
            held.nbytes = loading.result()
        elif self._adapters.get(key) is held:
            del self._adapters[key]  # the next one to ask tries again
        self._changed()

    def shrink(self, to_bytes: int) -> None:
        """Drops idle ones until no more than so much is left of them."""
        for key in sorted(self._adapters, key=lambda key: self._adapters[key].last_used):
            if self.idle_bytes <= to_bytes:
                return
            if self._adapters[key].gives_way:
                self._drop(*key)

    async def drop(self, model: str, name: str) -> None:
        """All weights by this name, once the rows that use them now have ended."""
        if leases := [each for held in self._of(model).values() for each in held.used_as(name)]:
            await asyncio.wait(leases)
        for digest, held in self._of(model).items():
            if held.adapter.spec.name != name:
                continue
            if not held.users:
                self._drop(model, digest)
            elif not held.used_as(name):
                held.adapter = next(iter(held.users.values()))

    def _of(self, model: str) -> dict[str, _LoadedAdapter]:
        return {digest: held for (id, digest), held in self._adapters.items() if id == model}

    def forget(self, model: str | None = None) -> None:
        """They have left the engine with their model; None: with the engine itself."""
        for id, digest in list(self._adapters):
            if model in (None, id):
                for lease in self._adapters.pop((id, digest)).users:
                    _end(lease)

    async def _load(self, model: str, spec: AdapterSpec) -> int:
        loaded = await self._engine().load_adapter(model, spec.digest, str(spec.path))
        if stamp_of(spec.path) != spec.stamp:
            await self._unload(model, spec.digest)
            raise AdapterInvalid(
                f"The files of adapter {spec.name!r} changed while it was being loaded. Ask again."
            )
        log.info("%s has adapter %s (%s)", model, spec.name, spec.digest[:8])
        return loaded.nbytes

    def _drop(self, model: str, digest: str) -> None:
        held = self._adapters.pop((model, digest))
        log.info("%s drops adapter %s (%s)", model, held.adapter.spec.name, digest[:8])
        leaving = asyncio.create_task(self._unload(model, digest))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _unload(self, model: str, digest: str) -> None:
        with suppress(Unavailable):
            await self._engine().unload_adapter(model, digest)


def _end(lease: asyncio.Future[None]) -> None:
    if not lease.done():
        lease.set_result(None)
