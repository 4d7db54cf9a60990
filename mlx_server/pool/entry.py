"""The pool's record of one model, and the view that the server shows of it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from mlx_server.checkpoints.folder_check import Stamp
from mlx_server.errors import ModelUnusable, ServerError
from mlx_server.lora.catalog import AdapterCatalog
from mlx_server.pool.prepare import (
    Capabilities,
    ModelSpec,
    PreparedModel,
    capabilities_on_disk,
    stamp_on_disk,
)
from mlx_server.pool.upstreams import UpstreamModel

OnProgress = Callable[[str, str, int, int], None]
"""Arguments: model id, description of the work, amount done, total amount."""


@dataclass(frozen=True)
class LoadedModel:
    """What the server process knows about a model that the engine has loaded."""

    prepared: PreparedModel
    vocabulary: int
    """The width of the output head: every token id below it can be generated or biased."""
    nbytes: int


@dataclass(frozen=True)
class LoadProgress:
    what: str
    done: int
    total: int


@dataclass(frozen=True)
class PrefillView:
    """The progress of a row whose prompt is being computed."""

    prompt_tokens: int
    computed_tokens: int


@dataclass(frozen=True)
class ModelView:
    """A model as the status endpoint and the chat UI show it."""

    spec: ModelSpec
    family: str | None
    """The family's name; None until the model's files have been read."""
    state: str
    leases: int
    nbytes: int
    last_used: float | None
    """The Unix time of its last use, in seconds."""
    stale_at: float | None
    """The Unix time at which it is unloaded if no request uses it before."""
    progress: LoadProgress | None
    error: str | None
    adapters: list[tuple[str, int, int]]
    """The name, leases and bytes of each adapter in memory."""
    batching: bool | None = None
    """Whether its answers are computed in one batch; None until it has been loaded once."""
    prefilling: tuple[PrefillView, ...] = ()
    """The rows in prefill, in order of arrival."""


@dataclass
class PoolEntry:
    """The pool's mutable state of one model."""

    spec: ModelSpec
    preparing: asyncio.Task[PreparedModel] | None = None
    prepared: PreparedModel | None = None
    model: LoadedModel | None = None
    failure: ServerError | None = None
    """The error of the most recent attempt to prepare or load the model."""
    unusable: ModelUnusable | None = None
    """The last error that was due to the model's files."""
    progress: LoadProgress | None = None
    batching: bool | None = None
    """Whether its answers are computed in one batch; None until it has been loaded once."""
    on_disk: AdapterCatalog | None = None
    """The adapters found on disk, which are shown until the model has been prepared."""
    capabilities: Capabilities | None = None
    """The capabilities found on disk, which are shown until the model has been prepared."""
    unreadable: Stamp | None = None
    """The files in which no capabilities were found."""
    upstream: UpstreamModel | None = None
    """The model on another server, if it is there and takes no memory here."""

    def look_for_capabilities(self) -> None:
        """Reads the files, unless they are those in which none were found: a template that does not
        end takes its whole time limit whenever it is read."""
        stamp = stamp_on_disk(self.spec)
        if stamp is None or stamp != self.unreadable:
            self.capabilities = capabilities_on_disk(self.spec)
            self.unreadable = None if self.capabilities else stamp
