"""The models that the server serves, by id and by alias."""

from collections.abc import Iterable, Iterator

from mlx_server.errors import NEAREST, BadRequest, ModelNotFound, served_names
from mlx_server.pool.entry import LoadedModel, PoolEntry
from mlx_server.pool.prepare import ModelSpec
from mlx_server.pool.upstreams import UpstreamModel, upstream_model


class ServedModels:
    def __init__(self, specs: Iterable[ModelSpec]) -> None:
        self._entries = {spec.id: PoolEntry(spec, upstream=upstream_model(spec)) for spec in specs}
        self._names = {n: id for id, e in self._entries.items() for n in (id, *e.spec.aliases)}
        self._listed = dict(self._names)

    def __getitem__(self, id: str) -> PoolEntry:
        return self._entries[id]

    def __iter__(self) -> Iterator[PoolEntry]:
        return iter(self._entries.values())

    def __contains__(self, name: str) -> bool:
        """Whether a model has this id or alias."""
        return name in self._names

    @property
    def ids(self) -> list[str]:
        return list(self._entries)

    @property
    def local(self) -> list[PoolEntry]:
        """The models that this server runs itself."""
        return [entry for entry in self if entry.upstream is None]

    @property
    def upstreams(self) -> list[UpstreamModel]:
        return [entry.upstream for entry in self if entry.upstream]

    @property
    def loaded(self) -> list[LoadedModel]:
        return [entry.model for entry in self if entry.model]

    def find(self, name: str) -> PoolEntry:
        """Finds a model by its id or an alias. Raises ModelNotFound."""
        if name not in self._names:
            known = self._entries if len(self._entries) <= NEAREST else self._names
            raise ModelNotFound(
                f"The model {name[:100]!r} is not served here. {served_names(name, known)} "
                "Add it to models.yaml, or pass it to `mlx-server serve`.",
                param="model",
            )
        return self._entries[self._names[name]]

    def add_alias(self, alias: str, id: str) -> None:
        """Makes `alias` another name of the model. Raises BadRequest if models.yaml gives that name
        to another model."""
        if (listed := self._listed.get(alias, id)) != id:
            raise BadRequest(
                f"The name {alias[:100]!r} is that of the model {listed}. Choose another name.",
                param="model",
            )
        self._names[alias] = id

    def split(self, name: str) -> tuple[str, str | None]:
        """Splits `model:adapter` into its parts. A name that is itself a model's id or alias is not
        split, and has no adapter."""
        model, _, adapter = name.rpartition(":")
        is_both = adapter and name not in self._names and model in self._names
        return (model, adapter) if is_both else (name, None)
