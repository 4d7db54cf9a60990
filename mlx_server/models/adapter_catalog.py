"""The adapters of a model: which exist, which can be served with the layers that the base model has
by its files, and what is wrong with the rest."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from mlx_server import limits
from mlx_server.errors import (
    AdapterInvalid,
    AdapterNotFound,
    BadRequest,
    ModelUnusable,
    served_names,
)
from mlx_server.models.adapter_config import CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS, invalid
from mlx_server.models.adapter_reader import (
    PICKLES,
    AdapterSpec,
    Stamp,
    names_in,
    read_adapter,
    stamp_of,
)
from mlx_server.models.files import (
    WEIGHTS,
    BadHeader,
    Tensor,
    check_model,
    is_inside,
    quantization_of,
    read_header_of,
    read_json,
)

DEMO_NAMES = {"demo:smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""The hub ids of the demo models."""

VARIANT = re.compile(
    r"[-_.](?:mlx|gguf|\d+-?bits?|q\d+|fp16|bf16|fp32|f16|f32|mxfp4|dwq|hf|unsloth|bnb)$",
    re.IGNORECASE,
)
"""Suffixes by which the names of one model's conversions differ."""


@dataclass(frozen=True)
class BaseModelShapes:
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Each layer's shape, (out, in) or (experts, out, in), by the layer's path."""
    complete: bool = False
    """Whether the paths are those of mlx-lm's model and none is missing."""
    names: frozenset[str] = frozenset()
    """The plain names by which an adapter's config may refer to the model."""


def read_base_shapes(folder: Path | None, source: str) -> BaseModelShapes:
    """Reads the shapes; layers whose shape the files don't reveal are left out.

    source: the model's `source:` in models.yaml.
    """
    names = _module_names(source, str(folder or source))
    if folder is None:
        return BaseModelShapes(names=names)
    try:
        check_model(folder)
        quantization = quantization_of(read_json(folder / "config.json")) or {}
        files = sorted(folder.glob(WEIGHTS))
        headers = [read_header_of(file, limits.CHECKPOINT_HEADER_BYTES) for file in files]
    except (ModelUnusable, BadHeader, OSError):  # loading the model reports it
        return BaseModelShapes(names=names)
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    shapes = {
        layer: shape
        for name, tensor in tensors.items()
        if (layer := name.removesuffix(".weight")) != name
        if (shape := _shape(layer, tensor, tensors, quantization))
    }
    complete = bool(headers) and all(h.metadata.get("format") == "mlx" for h in headers)
    return BaseModelShapes(shapes, complete, names)


def _shape(
    layer: str, tensor: Tensor, tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]
) -> tuple[int, ...] | None:
    if len(tensor.shape) not in (2, 3):
        return None
    if f"{layer}.scales" not in tensors:
        return tensor.shape
    own = quantization.get(layer)
    bits = (own if isinstance(own, dict) else quantization).get("bits")
    if tensor.dtype != "U32" or type(bits) is not int or not 0 < bits <= 32:
        return None
    return (*tensor.shape[:-1], tensor.shape[-1] * 32 // bits)


def _module_names(*names: str) -> frozenset[str]:
    hub_ids = (DEMO_NAMES.get(name, name) for name in names)
    return frozenset(map(plain_name, (*names, *hub_ids)))


def plain_name(model: str) -> str:
    """The name in a hub id or path, without suffixes of conversions, in lower case."""
    name = re.split(r"[/\\]", model.rstrip("/\\"))[-1]
    while (shorter := VARIANT.sub("", name)) != name:
        name = shorter
    return name.lower()


log = logging.getLogger("mlx_server.adapters")

NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,127}", re.ASCII)
"""Adapter names contain no colon, which separates them in `model:adapter`, and are no paths."""


@dataclass(frozen=True)
class AdapterLocation:
    """An adapter's folder and its settings."""

    path: Path
    allow_other_base: bool = False
    """Whether its config may name another base model; then only the shapes must fit."""
    by_client: bool = False
    """Whether a client added it while the server runs, and so may remove it at any time."""


class AddedAdapters:
    """The adapters that clients have added to one model, by name.

    Threads look adapters up while others add and remove them, so each change takes the lock. They
    belong to the served model and outlive the catalog, which is made again when files change.
    """

    def __init__(self) -> None:
        self.locations: dict[str, AdapterLocation] = {}
        self.lock = Lock()


class AdapterCatalog:
    """The adapters of one served model. Files that changed are read again on the next lookup."""

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
        """Folders that requests have named by path, by the name that each was given."""
        self.added = AddedAdapters()

    def locations(self) -> dict[str, AdapterLocation]:
        """All locations by name; a listed adapter takes precedence over a folder of its name."""
        scanned = {name: AdapterLocation(path) for name, path in scan(self._folder).items()}
        others = {**self._named, **self.added.locations}
        return dict(sorted({**others, **scanned, **self._listed}.items()))

    def _location_of(self, name: str) -> AdapterLocation | None:
        """Like `locations`, but looks at no other folder, of which there may be very many."""
        others = {**self._named, **self.added.locations}
        return self._configured_location(name) or others.get(name)

    def _configured_location(self, name: str) -> AdapterLocation | None:
        if listed := self._listed.get(name):
            return listed
        if self._folder and name in names_in(self._folder):
            path = self._folder / name
            return AdapterLocation(path) if _looks_like_adapter(path) else None
        return None

    def _names(self) -> set[str]:
        """The names of `locations`, and those of folders that are no adapters: no folder is looked
        into."""
        return {*self._named, *self.added.locations, *self._listed, *_subfolders(self._folder)}

    def location(self, name: str) -> AdapterLocation:
        """Raises AdapterNotFound."""
        location = self._location_of(name)
        if location is None and name in self._names():
            raise AdapterNotFound(
                f"The folder {name[:100]!r} of adapters has no {CONFIG}. Copy the one that was "
                "saved with the weights.",
                param="adapter",
            )
        if location is None:
            raise AdapterNotFound(
                f"There is no adapter {name[:100]!r} for this model. "
                f"{served_names(name, self._names())} `mlx-server adapters` lists them.",
                param="adapter",
            )
        return location

    def find(self, name: str) -> AdapterSpec:
        """Raises AdapterNotFound or AdapterInvalid."""
        return self.read(name, self.location(name))

    def read(self, name: str, location: AdapterLocation) -> AdapterSpec:
        """Reads the adapter at a location, even if the name has another one now.

        Raises AdapterInvalid.
        """
        spec = self._cached_spec(name, location)
        if isinstance(spec, AdapterInvalid):  # a new error each time: raising adds a traceback
            raise AdapterInvalid(spec.message)
        return spec

    def all(self) -> dict[str, AdapterSpec | AdapterInvalid]:
        """The adapters that can be served and the errors of the others, by name."""
        return {name: self._cached_spec(name, each) for name, each in self.locations().items()}

    def add(self, name: str, location: AdapterLocation) -> AdapterSpec:
        """Adds an adapter for a client. Raises AdapterInvalid or BadRequest, and adds nothing."""
        self._check_free(name)
        stamp, spec = stamp_of(location.path), self._read_spec(name, location)
        if isinstance(spec, AdapterInvalid):
            raise spec
        with self.added.lock:
            self._check_free(name)
            self.added.locations[name] = location
            names = self._names()
            self._known = {key: known for key, known in self._known.items() if key[0] in names}
            self._known[name, location] = stamp, spec
        return spec

    def remove(self, name: str) -> None:
        """Removes an adapter that a client added. Raises AdapterNotFound."""
        with self.added.lock:
            location = self.added.locations.pop(name, None)
        if location is None:
            raise AdapterNotFound(
                f"{name[:100]!r} was not loaded by a client, so no client can unload it.",
                param="lora_name",
            )

    def find_folder(self, folder: Path) -> tuple[AdapterSpec, AdapterLocation]:
        """Reads the adapter in a folder, and names it if it has no name. Raises AdapterInvalid."""
        name, location = self._named_folder(folder)
        spec = self.read(name, location)
        with self.added.lock:
            name, location = self._named_folder(folder)  # its name may have been taken meanwhile
            if self._location_of(name) is None:
                self._named[name] = location
        return replace(spec, name=name), location

    def check_there(self, name: str) -> None:
        """Raises AdapterNotFound if the adapter that a client added was removed."""
        if name not in self.added.locations:
            raise AdapterNotFound(f"The adapter {name[:100]!r} was unloaded.", param="adapter")

    def _named_folder(self, folder: Path) -> tuple[str, AdapterLocation]:
        same = self._location_of(folder.name)
        own = {folder.name: same} if same else {}
        for name, each in {**own, **self._named, **self.added.locations, **self._listed}.items():
            if each.path.resolve() == folder and each == self._location_of(name):
                return name, each
        # a name that is taken keeps its meaning, so this folder gets a longer one
        longer = f"{folder.name}-{sha256(bytes(folder)).hexdigest()[:8]}"
        return longer if same else folder.name, AdapterLocation(folder)

    def _check_free(self, name: str) -> None:
        """Raises BadRequest if a client can't use the name; it may replace a client's adapter."""
        added, most = self.added.locations, limits.ADDED_ADAPTERS
        if name in added:
            return
        # not `_location_of`, which would find the same name added by another thread meanwhile
        if name in self._named or self._configured_location(name):
            raise BadRequest(
                f"The model already has an adapter {name[:100]!r}. Choose another name.",
                param="lora_name",
            )
        if len(added) >= most:
            raise BadRequest(
                f"Clients have loaded {most} adapters for this model, which is the limit. Unload "
                "one first.",
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
    """The subfolders that contain adapter files, by name."""
    names, most = sorted(names_in(folder)), limits.LISTED_ADAPTERS
    if folder and len(names) > most:
        log.warning(
            "%s has %d entries; only the first %d are searched for the list of adapters. The "
            "others are served when requested by name",
            folder.name,
            len(names),
            most,
        )
    paths = [folder / name for name in names[:most]] if folder else []
    return {path.name: path for path in paths if _looks_like_adapter(path)}


def _subfolders(folder: Path | None) -> list[str]:
    """Without files such as README.md and .DS_Store."""
    return [name for name in names_in(folder) if Path(folder or "", name).is_dir()]


def _looks_like_adapter(path: Path) -> bool:
    if path.name.startswith(".") or not path.is_dir():
        return False
    if any(os.path.lexists(path / name) for name in (CONFIG, MLX_WEIGHTS, PEFT_WEIGHTS)):
        return True
    return any(name.endswith(PICKLES) for name in names_in(path))


def check_name(name: str) -> None:
    """Raises AdapterInvalid."""
    if not NAME.fullmatch(name):
        raise AdapterInvalid(
            f"{name[:200]!r} can't be the name of an adapter. Use up to 128 letters, digits, `.`, "
            "`_`, `+` and `-`, starting with a letter or digit."
        )


def check_link(path: Path, folder: Path | None) -> None:
    """Raises AdapterInvalid for a link in the adapters' folder that points outside of it."""
    if folder and path.parent == folder and not is_inside(path, folder):
        raise AdapterInvalid(
            f"Adapter {path.name!r} is a link to outside of {folder.name!r}. Copy its files "
            "there, or list its folder under `adapters:` of the model in models.yaml."
        )


def _check_base(spec: AdapterSpec, base: BaseModelShapes) -> None:
    if spec.base and base.names and plain_name(spec.base) not in base.names:
        raise invalid(
            spec.path,
            f"was trained on {spec.base[:200]!r} according to its {CONFIG}, which is not this "
            "model. If that is another name of the same model, list the adapter under `adapters:` "
            "of the model in models.yaml with `allow_other_base: true`",
        )
