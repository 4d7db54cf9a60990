"""Which models are in memory, who uses them, and how many answers may wait."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from mlx_server.engine.client import EngineClient
from mlx_server.errors import BadRequest, ModelNotFound, Overloaded, ServerError, ShuttingDown
from mlx_server.families import family_of
from mlx_server.families.base import ModelFamily
from mlx_server.families.checkpoint import Checkpoint, read_checkpoint
from mlx_server.pool.sources import resolve
from mlx_server.requests import SamplingChoices

log = logging.getLogger("mlx_server.pool")

State = Literal["unloaded", "loading", "ready", "failed"]
OnProgress = Callable[[str, str, int, int], None]
"""(model, what is being done, how much is done, of how much)."""


@dataclass(frozen=True)
class ModelSpec:
    """One entry of models.yaml."""

    id: str
    source: str
    aliases: tuple[str, ...] = ()
    family: str | None = None
    chat_template: str | None = None
    context_length: int | None = None
    max_tokens: int | None = None
    choices: SamplingChoices = field(default_factory=SamplingChoices)
    preload: bool = False


@dataclass(frozen=True)
class Model:
    """A loaded model, as much of it as the server process needs."""

    id: str
    spec: ModelSpec
    checkpoint: Checkpoint
    family: ModelFamily
    vocabulary: int
    """Width of the output head: every token id below it can be generated or biased."""
    nbytes: int

    @property
    def context_length(self) -> int:
        return self.spec.context_length or self.checkpoint.context_length


class Pool:
    """One engine process and the listed models, each loaded once, when first needed."""

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        *,
        concurrency: int = 16,
        queue: int = 64,
        on_progress: OnProgress = lambda *progress: None,
    ) -> None:
        self.specs = {spec.id: spec for spec in specs}
        self.concurrency = concurrency
        self.engine = EngineClient(concurrency=concurrency)
        self.rows = 0
        """Answers being generated or waiting for it."""
        self._most_rows = concurrency + queue
        self._on_progress = on_progress
        self._names = {n: s.id for s in self.specs.values() for n in (s.id, *s.aliases)}
        self._loads: dict[str, asyncio.Task[Model]] = {}

    async def start(self) -> None:
        await self.engine.start()
        for spec in self.specs.values():
            if spec.preload:
                self._loading(spec)

    async def stop(self, error: ServerError | None = None) -> None:
        for load in self._loads.values():
            load.cancel()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)
        await self.engine.stop(error)

    def spec(self, name: str) -> ModelSpec:
        """By id or alias."""
        if name not in self._names:
            listed = ", ".join(self.specs) or "none"
            raise ModelNotFound(
                f"The model {name[:100]!r} is not served here. Served: {listed}. "
                "List it in models.yaml, or name it to `mlx-server serve`.",
                param="model",
            )
        return self.specs[self._names[name]]

    def state(self, model: str) -> State:
        load = self._loads.get(model)
        if load is None:
            return "unloaded"
        if not load.done():
            return "loading"
        return "failed" if load.cancelled() or load.exception() else "ready"

    @property
    def loaded(self) -> list[Model]:
        return [load.result() for id, load in self._loads.items() if self.state(id) == "ready"]

    @asynccontextmanager
    async def acquire(self, name: str, rows: int = 1) -> AsyncIterator[Model]:
        """A lease on the model, and a place for `rows` answers, until the block is left."""
        spec = self.spec(name)
        if rows > self._most_rows:
            raise BadRequest(
                f"One request may ask for at most {self._most_rows} answers here, not {rows}: "
                "send fewer prompts, or a smaller `n`."
            )
        if self.rows + rows > self._most_rows:
            raise Overloaded(f"The queue is full: {self.rows} answers are under way or waiting.")
        self.rows += rows
        try:
            yield await self._ready(spec)
        finally:
            self.rows -= rows

    async def _ready(self, spec: ModelSpec) -> Model:
        load = self._loading(spec)
        try:
            return await asyncio.shield(load)
        except asyncio.CancelledError:
            if load.cancelled():  # by `stop`, not because this one waits no more
                raise ShuttingDown("The server is shutting down.") from None
            raise

    def _loading(self, spec: ModelSpec) -> asyncio.Task[Model]:
        if self.state(spec.id) in ("unloaded", "failed"):
            load = self._loads[spec.id] = asyncio.create_task(self._load(spec))
            # a preload that fails has been logged, and may have nobody waiting for it
            load.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._loads[spec.id]

    async def _load(self, spec: ModelSpec) -> Model:
        try:
            return await self._loaded(spec)
        except ServerError as error:
            log.error("%s: %s", spec.id, error.message)
            raise
        except Exception:
            log.exception("%s did not load", spec.id)
            raise

    async def _loaded(self, spec: ModelSpec) -> Model:
        def progress(what: str, done: int, total: int) -> None:
            self._on_progress(spec.id, what, done, total)

        path = await asyncio.to_thread(resolve, spec.source, progress)
        checkpoint = await asyncio.to_thread(read_checkpoint, path, spec.chat_template)
        family = family_of(checkpoint, spec.family)
        loaded = await self.engine.load(
            spec.id, str(path), lambda done, total: progress("loading", done, total)
        )
        log.info("%s is ready: family %s, %d MB", spec.id, family.name, loaded.nbytes >> 20)
        return Model(spec.id, spec, checkpoint, family, loaded.vocabulary, loaded.nbytes)
