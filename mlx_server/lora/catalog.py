"""Which adapters there are for a model, which are sound, and what is wrong with the rest."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_server.errors import AdapterInvalid, AdapterNotFound
from mlx_server.folders import is_inside
from mlx_server.lora.base import Base, plain_name
from mlx_server.lora.config import CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS, invalid
from mlx_server.lora.reader import (
    PICKLES,
    AdapterSpec,
    Stamp,
    names_in,
    read_adapter,
    stamp_of,
)

__all__ = ["AdapterSpec", "Catalog", "Place", "read_adapter", "scan", "stamp_of"]

NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,127}", re.ASCII)
"""No colon, which parts a model from its adapter in `model:adapter`; nothing that is a path."""


@dataclass(frozen=True)
class Place:
    """Where an adapter is, and what the owner says of it."""

    path: Path
    pinned: bool = False
    """Never dropped to make room."""
    allow_other_base: bool = False
    """Whatever model its config names: its shapes decide."""


class Catalog:
    """The adapters of one served model. Files that changed are read anew when asked for."""

    def __init__(
        self, base: Base, listed: Mapping[str, Place] | None = None, folder: Path | None = None
    ) -> None:
        self._base = base
        self._listed = dict(listed or {})
        self._folder = folder
        self._known: dict[tuple[str, Place], tuple[Stamp, AdapterSpec | AdapterInvalid]] = {}

    def places(self) -> dict[str, Place]:
        """By name; one that is listed wins over a folder of its name."""
        found = {name: Place(path) for name, path in scan(self._folder).items()}
        return dict(sorted({**found, **self._listed}.items()))

    def find(self, name: str) -> AdapterSpec:
        """Raises AdapterNotFound or AdapterInvalid."""
        place = self.places().get(name)
        if place is None:
            raise AdapterNotFound(
                f"There is no adapter {name[:100]!r} for this model. `mlx-server adapters` shows "
                "which there are.",
                param="adapter",
            )
        found = self._read(name, place)
        if isinstance(found, AdapterInvalid):  # a new one each time: raising adds a traceback
            raise AdapterInvalid(found.message)
        return found

    def all(self) -> dict[str, AdapterSpec | AdapterInvalid]:
        """By name, those that can be served and what is wrong with the others."""
        return {name: self._read(name, place) for name, place in self.places().items()}

    def add(self, name: str, place: Place) -> AdapterSpec:
        """While the server runs. Raises AdapterInvalid, and then nothing is added."""
        stamp, found = stamp_of(place.path), self._read_anew(name, place)
        if isinstance(found, AdapterInvalid):
            raise found
        self._listed[name] = place
        self._known[name, place] = stamp, found
        return found

    def remove(self, name: str) -> None:
        """Of one that was added."""
        self._known.pop((name, self._listed.pop(name)), None)

    def _read(self, name: str, place: Place) -> AdapterSpec | AdapterInvalid:
        key, stamp = (name, place), stamp_of(place.path)
        if (known := self._known.get(key)) is None or known[0] != stamp:
            known = self._known[key] = stamp, self._read_anew(name, place)
        return known[1]

    def _read_anew(self, name: str, place: Place) -> AdapterSpec | AdapterInvalid:
        try:
            check_name(name)
            check_link(place.path, self._folder)
            base = self._base
            spec = read_adapter(place.path, base_shapes=base.shapes, complete=base.complete)
            if not place.allow_other_base:
                _check_base(spec, base)
        except AdapterInvalid as error:
            return error
        return replace(spec, name=name)


def scan(folder: Path | None) -> dict[str, Path]:
    """The folders in it that have something of an adapter, by name."""
    try:
        inner = sorted(folder.iterdir()) if folder else []
    except OSError:
        return {}
    return {path.name: path for path in inner if _looks_like_adapter(path)}


def _looks_like_adapter(path: Path) -> bool:
    if path.name.startswith(".") or not path.is_dir():
        return False
    own = (CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS)
    return any(name in own or name.endswith(PICKLES) for name in names_in(path))


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


def _check_base(spec: AdapterSpec, base: Base) -> None:
    if spec.base and base.names and plain_name(spec.base) not in base.names:
        raise invalid(
            spec.path,
            f"was trained on {spec.base!r}, says {CONFIG}, and this model is another. If it is the "
            "same under another name, list the adapter under `adapters:` of the model in "
            "models.yaml with `allow_other_base: true`",
        )
