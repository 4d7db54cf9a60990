"""Which adapters there are for a model, which are sound, and what is wrong with the rest."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from threading import Lock

from mlx_server import limits
from mlx_server.checkpoints.folder_check import is_inside
from mlx_server.errors import AdapterInvalid, AdapterNotFound, BadRequest
from mlx_server.lora.base_model import BaseModelShapes, plain_name
from mlx_server.lora.config import CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS, invalid
from mlx_server.lora.reader import (
    PICKLES,
    AdapterSpec,
    Stamp,
    read_adapter,
    stamp_of,
)

log = logging.getLogger("mlx_server.lora")

__all__ = ["AdapterCatalog", "AdapterLocation", "AdapterSpec", "read_adapter", "scan", "stamp_of"]

NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,127}", re.ASCII)
"""No colon, which parts a model from its adapter in `model:adapter`; nothing that is a path."""


@dataclass(frozen=True)
class AdapterLocation:
    """Where an adapter is, and what the owner says of it."""

    path: Path
    pinned: bool = False
    """Never dropped to make room."""
    allow_other_base: bool = False
    """Whatever model its config names: its shapes decide."""
    by_client: bool = False
    """It was added while the server runs, and may be removed at any time."""


class AddedAdapters:
    """The adapters that clients have added to one model, by name.

    Threads look adapters up while others come and go, so each change is one step under a lock.
    They belong to the served model and outlive the catalog, which is made anew with the files.
    """

    def __init__(self) -> None:
        self.locations: dict[str, AdapterLocation] = {}
        self.lock = Lock()


class AdapterCatalog:
    """The adapters of one served model. Files that changed are read anew when asked for."""

    def __init__(
        self,
        base: BaseModelShapes,
        listed: Mapping[str, AdapterLocation] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._base = base
        self._listed = dict(listed or {})
        self._folder = folder
        self._known: dict[
            tuple[str, AdapterLocation], tuple[Stamp, AdapterSpec | AdapterInvalid]
        ] = {}
        self._named: dict[str, AdapterLocation] = {}
        """Of folders that requests have named by their paths."""
        self.added = AddedAdapters()

    def locations(self) -> dict[str, AdapterLocation]:
        """By name; one that is listed wins over a folder of its name."""
        found = {name: AdapterLocation(path) for name, path in scan(self._folder).items()}
        others = {**self._named, **self.added.locations}
        return dict(sorted({**others, **found, **self._listed}.items()))

    def _place_of(self, name: str) -> AdapterLocation | None:
        """As in `places`, without a look at every other folder: there may be very many."""
        others = {**self._named, **self.added.locations}
        return self._owners_place(name) or others.get(name)

    def _owners_place(self, name: str) -> AdapterLocation | None:
        if listed := self._listed.get(name):
            return listed
        if self._folder and name in _names(self._folder):
            path = self._folder / name
            return AdapterLocation(path) if _looks_like_adapter(path) else None
        return None

    def location(self, name: str) -> AdapterLocation:
        """Raises AdapterNotFound."""
        place = self._place_of(name)
        if place is None:
            raise AdapterNotFound(
                f"There is no adapter {name[:100]!r} for this model. `mlx-server adapters` shows "
                "which there are.",
                param="adapter",
            )
        return place

    def find(self, name: str) -> AdapterSpec:
        """Raises AdapterNotFound or AdapterInvalid."""
        return self.read(name, self.location(name))

    def read(self, name: str, location: AdapterLocation) -> AdapterSpec:
        """What is there, whatever the name has come to mean meanwhile. Raises AdapterInvalid."""
        found = self._cached_spec(name, location)
        if isinstance(found, AdapterInvalid):  # a new one each time: raising adds a traceback
            raise AdapterInvalid(found.message)
        return found

    def all(self) -> dict[str, AdapterSpec | AdapterInvalid]:
        """By name, those that can be served and what is wrong with the others."""
        return {name: self._cached_spec(name, place) for name, place in self.locations().items()}

    def add(self, name: str, location: AdapterLocation) -> AdapterSpec:
        """For a client. Raises AdapterInvalid or BadRequest, and then nothing is added."""
        self._check_free(name)
        stamp, found = stamp_of(location.path), self._read_spec(name, location)
        if isinstance(found, AdapterInvalid):
            raise found
        with self.added.lock:
            self._check_free(name)
            self.added.locations[name] = location
            there = {*self._named, *self.added.locations, *self._listed, *_names(self._folder)}
            self._known = {key: known for key, known in self._known.items() if key[0] in there}
            self._known[name, location] = stamp, found
        return found

    def remove(self, name: str) -> None:
        """Of one that a client added. Raises AdapterNotFound."""
        with self.added.lock:
            place = self.added.locations.pop(name, None)
        if place is None:
            raise AdapterNotFound(
                f"{name[:100]!r} was not loaded by a client, so no client can unload it.",
                param="lora_name",
            )

    def find_folder(self, folder: Path) -> tuple[AdapterSpec, AdapterLocation]:
        """The adapter in a folder, which gets a name if it has none. Raises AdapterInvalid."""
        name, place = self._named_folder(folder)
        spec = self.read(name, place)
        with self.added.lock:
            name, place = self._named_folder(folder)  # another may have taken its name meanwhile
            if self._place_of(name) is None:
                self._named[name] = place
        return replace(spec, name=name), place

    def check_there(self, name: str) -> None:
        """Of one that a client added. Raises AdapterNotFound."""
        if name not in self.added.locations:
            raise AdapterNotFound(f"The adapter {name[:100]!r} was unloaded.", param="adapter")

    def _named_folder(self, folder: Path) -> tuple[str, AdapterLocation]:
        same = self._place_of(folder.name)
        own = {folder.name: same} if same else {}
        for name, place in {**own, **self._named, **self.added.locations, **self._listed}.items():
            if place.path.resolve() == folder and place == self._place_of(name):
                return name, place
        # a name that is taken goes on meaning what its owner gave it to
        longer = f"{folder.name}-{sha256(bytes(folder)).hexdigest()[:8]}"
        return longer if same else folder.name, AdapterLocation(folder)

    def _check_free(self, name: str) -> None:
        """Raises BadRequest. A client may put another adapter in the place of its own."""
        added, most = self.added.locations, limits.ADDED_ADAPTERS.value
        if name in added:
            return
        # not `places`, to which another thread may have added it since
        if name in self._named or self._owners_place(name):
            raise BadRequest(f"The model has an adapter {name[:100]!r} already.", param="lora_name")
        if len(added) >= most:
            raise BadRequest(
                f"Clients have loaded {most} adapters of this model, which is the most. Unload one "
                "first.",
                param="lora_name",
            )

    def _cached_spec(self, name: str, location: AdapterLocation) -> AdapterSpec | AdapterInvalid:
        key, stamp = (name, location), stamp_of(location.path)
        if (known := self._known.get(key)) is None or known[0] != stamp:
            known = self._known[key] = stamp, self._read_spec(name, location)
        return known[1]

    def _read_spec(self, name: str, location: AdapterLocation) -> AdapterSpec | AdapterInvalid:
        try:
            check_name(name)
            check_link(location.path, self._folder)
            base = self._base
            spec = read_adapter(location.path, base_shapes=base.shapes, complete=base.complete)
            if not location.allow_other_base:
                _check_base(spec, base)
        except AdapterInvalid as error:
            return error
        return replace(spec, name=name)


def scan(folder: Path | None) -> dict[str, Path]:
    """The folders in it that have something of an adapter, by name."""
    names, most = sorted(_names(folder)), limits.LISTED_ADAPTERS.value
    if folder and len(names) > most:
        log.warning(
            "%s holds %d files and folders, of which the first %d are looked at for a list of "
            "adapters: the others are served by their names",
            folder.name,
            len(names),
            most,
        )
    paths = [folder / name for name in names[:most]] if folder else []
    return {path.name: path for path in paths if _looks_like_adapter(path)}


def _names(folder: Path | None) -> list[str]:
    try:
        return os.listdir(folder) if folder else []
    except OSError:
        return []


def _looks_like_adapter(path: Path) -> bool:
    if path.name.startswith(".") or not path.is_dir():
        return False
    if any(os.path.lexists(path / name) for name in (CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS)):
        return True
    return any(name.endswith(PICKLES) for name in _names(path))


def check_name(name: str) -> None:
    """Raises AdapterInvalid."""
    if not NAME.fullmatch(name):
        raise AdapterInvalid(
            f"{name[:200]!r} can't be the name of an adapter. Use letters, digits, `.`, `_`, `+` "
            "and `-`, at most 128, the first a letter or digit."
        )


def check_link(path: Path, folder: Path | None) -> None:
    """Of what is in the adapters' folder, nothing may be a link that leads out of it."""
    if folder and path.parent == folder and not is_inside(path, folder):
        raise AdapterInvalid(
            f"Adapter {path.name!r} is a link that leads out of {folder.name!r}. Put its "
            "files there, or name its folder under `adapters:` of the model in models.yaml."
        )


def _check_base(spec: AdapterSpec, base: BaseModelShapes) -> None:
    if spec.base and base.names and plain_name(spec.base) not in base.names:
        raise invalid(
            spec.path,
            f"was trained on {spec.base!r}, says {CONFIG}, and this model is another. If it is the "
            "same under another name, list the adapter under `adapters:` of the model in "
            "models.yaml with `allow_other_base: true`",
        )
