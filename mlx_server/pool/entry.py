"""What the pool keeps of one model, and shows of it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from mlx_server.errors import ServerError
from mlx_server.lora.catalog import AdapterCatalog
from mlx_server.pool.prepare import ModelSpec, PreparedModel

OnProgress = Callable[[str, str, int, int], None]
"""(model, what is being done, how much is done, of how much)."""


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model, as much of it as the server process needs."""

    prepared: PreparedModel
    vocabulary: int
    """Width of the output head: every token id below it can be generated or biased."""
    nbytes: int


@dataclass(frozen=True)
class LoadProgress:
    what: str
    done: int
    total: int


@dataclass(frozen=True)
class PrefillView:
    """A row whose prompt is being computed."""

    prompt_tokens: int
    computed_tokens: int


@dataclass(frozen=True)
class ModelView:
    """A model as its owner sees it."""

    spec: ModelSpec
    family: str | None
    """None until its files have been looked at."""
    state: str
    leases: int
    nbytes: int
    last_used: float | None
    """Unix time."""
    progress: LoadProgress | None
    error: str | None
    adapters: list[tuple[str, int, int]]
    """Those in memory: name, leases and bytes."""
    batching: bool | None = None
    """Whether its answers are computed together; None: it was not loaded yet."""
    prefilling: tuple[PrefillView, ...] = ()
    """In order of arrival."""


@dataclass
class PoolEntry:
    """What the pool keeps of one model."""

    spec: ModelSpec
    preparing: asyncio.Task[PreparedModel] | None = None
    prepared: PreparedModel | None = None
    model: LoadedModel | None = None
    failure: ServerError | None = None
    """Of the last attempt."""
    progress: LoadProgress | None = None
    batching: bool | None = None
    """Known from its first load on."""
    on_disk: AdapterCatalog | None = None
    """Its adapters, while its own files have not been looked at."""
