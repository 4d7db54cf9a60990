"""Models' adapters: those on disk, as requests name them, and those in the engine's memory."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from os.path import exists  # Path.exists raises on a name that is too long
from pathlib import Path

from mlx_server.engine.client import EngineClient
from mlx_server.errors import AdapterInvalid, AdapterNotFound, Unavailable
from mlx_server.models.adapter_catalog import AdapterCatalog
from mlx_server.models.adapter_reader import AdapterSpec, stamp_of
from mlx_server.pool.prepare import PreparedModel

log = logging.getLogger("mlx_server.pool")


@dataclass(frozen=True)
class LeasedAdapter:
    """An adapter as one request named it."""

    spec: AdapterSpec
    by_client: bool = False
    """Whether a client added it by the API, so that a client may also remove it while the request
    waits."""


@dataclass
class _LoadedAdapter:
    adapter: LeasedAdapter
    loading: asyncio.Task[int]
    """Returns the adapter's size in bytes."""
    nbytes: int
    users: dict[asyncio.Future[None], LeasedAdapter] = field(default_factory=dict)
    """The adapter as each request named it (two names may have the same weights), by a future
    that is done when the lease ends."""
    last_used: float = 0.0

    @property
    def leases(self) -> int:
        return len(self.users)

    @property
    def unreserved_bytes(self) -> int:
        """The bytes in use that no lease reserved.

        A lease reserves the size of the file; in memory the weights may take more.
        """
        return max(0, self.nbytes - self.leases * self.adapter.spec.nbytes) if self.leases else 0

    def used_as(self, name: str) -> list[asyncio.Future[None]]:
        return [lease for lease, adapter in self.users.items() if adapter.spec.name == name]


def find_adapter(catalog: AdapterCatalog, name: str, allowed: Sequence[Path]) -> LeasedAdapter:
    """Finds an adapter by name, or by a path inside one of the `allowed` folders.

    Raises AdapterNotFound or AdapterInvalid.
    """
    if "/" in name:
        spec, location = catalog.find_folder(allowed_folder(name, allowed))
    else:  # a single lookup, because a client may remove the name between two
        location = catalog.location(name)
        spec = catalog.read(name, location)
    return LeasedAdapter(spec, location.by_client)


def allowed_folder(path: str, allowed: Sequence[Path]) -> Path:
    """Returns the folder at a path, which may be relative to this process, or to the folder of the
    models.yaml that names an allowed folder. Raises AdapterNotFound."""
    parents = (parent for each in allowed for parent in each.parents)
    begins = () if "\0" in path else (Path(), *parents)  # resolve() raises on a NUL
    folders = dict.fromkeys((begin / path).resolve() for begin in begins)
    inside = [each for each in folders if any(each.is_relative_to(a.resolve()) for a in allowed)]
    folder = next(filter(exists, inside), None)
    if folder is None:
        raise AdapterNotFound(
            f"There is no adapter {path[:200]!r} here. Use one that `mlx-server adapters` lists, "
            "or add its folder to `adapter_dirs` under `server` in models.yaml.",
            param="adapter",
        )
    return folder


class AdapterPool:
    def __init__(self, engine: Callable[[], EngineClient], changed: Callable[[], None]) -> None:
        """changed: called whenever `idle_bytes` or `unreserved_bytes` may have changed."""
        self._engine = engine
        self._changed = changed
        self._adapters: dict[tuple[str, str], _LoadedAdapter] = {}
        """The adapters by model id and digest of their weights."""
        self._leaving: set[asyncio.Task[None]] = set()
        self.idle_bytes = 0
        """Bytes of the adapters that can be dropped to make room."""

    def _recount(self) -> None:
        self.idle_bytes = sum(held.nbytes for held in self._adapters.values() if not held.users)

    def unreserved_bytes(self, model: str) -> int:
        """Bytes of the model's adapters that can't be dropped and that no lease reserved."""
        return sum(held.unreserved_bytes for (id, _), held in self._adapters.items() if id == model)

    def loaded_for(self, model: str) -> list[tuple[str, int, int]]:
        """The name, leases and bytes of each adapter that is loaded for the model."""
        loaded = [held for (id, _), held in self._adapters.items() if id == model]
        return [(held.adapter.spec.name, held.leases, held.nbytes) for held in loaded]

    @asynccontextmanager
    async def lease(self, model: str, adapter: LeasedAdapter) -> AsyncIterator[None]:
        """Keeps the adapter in the engine until the block is left; the model must be leased too."""
        key = model, adapter.spec.digest
        held = self._adapters.get(key)
        if held is None:
            loading = asyncio.create_task(self._load(model, adapter.spec))
            held = self._adapters[key] = _LoadedAdapter(adapter, loading, adapter.spec.nbytes)
            loading.add_done_callback(partial(self._loaded, key, held))
        lease: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        held.users[lease] = adapter
        self._recount()
        self._changed()
        try:
            await asyncio.shield(held.loading)
            yield
        finally:
            held.users.pop(lease)
            held.last_used = asyncio.get_running_loop().time()
            _end_lease(lease)
            self._recount()
            self._changed()

    def _loaded(
        self, key: tuple[str, str], held: _LoadedAdapter, loading: asyncio.Task[int]
    ) -> None:
        if not loading.cancelled() and not loading.exception():
            held.nbytes = loading.result()
        elif self._adapters.get(key) is held:
            del self._adapters[key]  # so that the next request loads it again
        self._recount()
        self._changed()

    def shrink(self, to_bytes: int) -> None:
        """Drops idle adapters until they take no more than `to_bytes`."""
        for key in sorted(self._adapters, key=lambda key: self._adapters[key].last_used):
            if self.idle_bytes <= to_bytes:
                return
            if not self._adapters[key].users:
                self._drop(*key)

    async def drop(self, model: str, name: str) -> None:
        """Waits until no row uses the model's adapter `name`, and drops its weights. Weights that
        requests also use under another name stay under that name."""
        loaded = self._by_digest(model).values()
        if leases := [each for held in loaded for each in held.used_as(name)]:
            await asyncio.wait(leases)
        for digest, held in self._by_digest(model).items():
            if held.adapter.spec.name != name:
                continue
            if not held.users:
                self._drop(model, digest)
            elif not held.used_as(name):
                held.adapter = next(iter(held.users.values()))

    def _by_digest(self, model: str) -> dict[str, _LoadedAdapter]:
        return {digest: held for (id, digest), held in self._adapters.items() if id == model}

    def forget(self, model: str | None = None) -> None:
        """Removes the records of adapters whose memory is gone with their model, or with the engine
        if `model` is None."""
        for id, digest in list(self._adapters):
            if model in (None, id):
                for lease in self._adapters.pop((id, digest)).users:
                    _end_lease(lease)
        self._recount()

    async def _load(self, model: str, spec: AdapterSpec) -> int:
        loaded = await self._engine().load_adapter(model, spec.digest, str(spec.path))
        if stamp_of(spec.path) != spec.stamp:
            await self._unload(model, spec.digest)
            raise AdapterInvalid(
                f"The files of adapter {spec.name!r} changed while it was being loaded. Send the "
                "request again."
            )
        log.info("%s has adapter %s (%s)", model, spec.name, spec.digest[:8])
        return loaded.nbytes

    def _drop(self, model: str, digest: str) -> None:
        held = self._adapters.pop((model, digest))
        self._recount()
        log.info("%s drops adapter %s (%s)", model, held.adapter.spec.name, digest[:8])
        leaving = asyncio.create_task(self._unload(model, digest))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _unload(self, model: str, digest: str) -> None:
        with suppress(Unavailable):
            await self._engine().unload_adapter(model, digest)


def _end_lease(lease: asyncio.Future[None]) -> None:
    if not lease.done():
        lease.set_result(None)


def catalog_of(prepared: PreparedModel) -> AdapterCatalog:
    """The model's adapters. Raises AdapterNotFound for a replay model, which can't have any."""
    if prepared.adapters is None:
        raise AdapterNotFound(
            f"{prepared.id} plays recorded answers and has no adapters. Leave out `adapter`.",
            param="adapter",
        )
    return prepared.adapters
