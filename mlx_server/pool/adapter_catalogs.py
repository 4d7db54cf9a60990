"""The adapters on disk, by model, as requests and clients name them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mlx_server.errors import AdapterNotFound
from mlx_server.lora.catalog import AdapterCatalog, AdapterLocation, AdapterSpec
from mlx_server.pool.adapters import LeasedAdapter, allowed_folder, find
from mlx_server.pool.disk_threads import DiskThreads
from mlx_server.pool.entry import PoolEntry
from mlx_server.pool.prepare import PreparedModel, catalog_on_disk


class AdapterCatalogs:
    def __init__(self, disk: DiskThreads, allowed: Sequence[Path]) -> None:
        """allowed: folders inside which a client may name any folder as an adapter."""
        self._disk = disk
        self.allowed = allowed

    async def find(self, prepared: PreparedModel, name: str) -> LeasedAdapter:
        """Finds an adapter by name or path, and reads its files if they have changed."""
        look = partial(find, catalog_of(prepared), name, self.allowed)
        return await self._disk.run_in_turn(prepared.id, look)

    async def names(self, entry: PoolEntry) -> list[str]:
        """The names of the model's usable adapters on disk. It downloads nothing."""

        def names() -> list[str]:
            if entry.prepared:
                catalog = entry.prepared.adapters
            else:  # the catalog is kept in the entry since it caches the files that it has read
                catalog = entry.on_disk = entry.on_disk or catalog_on_disk(entry.spec)
            found = catalog.all() if catalog else {}
            return [name for name, spec in found.items() if isinstance(spec, AdapterSpec)]

        return await self._disk.run_in_turn(entry.spec.id, names)

    async def add(self, prepared: PreparedModel, name: str, path: str) -> AdapterSpec:
        catalog = catalog_of(prepared)
        place = AdapterLocation(allowed_folder(path, self.allowed), by_client=True)
        return await self._disk.run_in_turn(prepared.id, partial(catalog.add, name, place))


def catalog_of(prepared: PreparedModel) -> AdapterCatalog:
    """The model's adapters. Raises AdapterNotFound for a replay model, which can't have any."""
    if prepared.adapters is None:
        raise AdapterNotFound(
            f"{prepared.id} plays recorded answers and has no adapters. Leave out `adapter`.",
            param="adapter",
        )
    return prepared.adapters
