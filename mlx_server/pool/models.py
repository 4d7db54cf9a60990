"""The models that the server serves: what is known of each, and the reading of its files.

A model on another server is known from models.yaml; the files of the others are downloaded,
read and loaded once for all requests.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import KvCost, LoadModel, MeasureCache, ModelLoaded
from mlx_server.errors import (
    NEAREST,
    BadRequest,
    EngineDied,
    ModelNotFound,
    ModelReplaced,
    ModelUnusable,
    ServerError,
    served_names,
)
from mlx_server.families.base import ModelFamily
from mlx_server.models.adapter_catalog import AdapterCatalog
from mlx_server.models.adapter_reader import AdapterSpec
from mlx_server.models.files import Stamp
from mlx_server.pool.policy import Policy
from mlx_server.pool.prepare import (
    REPLAY,
    Capabilities,
    ModelSpec,
    PreparedModel,
    capabilities_on_disk,
    catalog_on_disk,
    check_files,
    is_current,
    prepare,
    stamp_on_disk,
)
from mlx_server.upstream.connection import UpstreamConnection
from mlx_server.upstream.spec import UpstreamCapabilities, UpstreamSpec
from mlx_server.upstream.text_families import (
    opening_of_reasoning,
    text_family,
    thought_tags,
)

if TYPE_CHECKING:
    from rich.progress import TaskID


T = TypeVar("T")

STOP_SECONDS = 0.2
"""How long a server that stops waits for threads to end, for example those of downloads."""

THREADS_PER_MODEL = 3
"""The threads for each model. At most three tasks of one model run at once: its preparation, its
load and a lookup for a request, for example of its adapters."""


class DiskThreads:
    """Enough threads for all models, so that a disk that does not answer blocks only the models on
    it."""

    def __init__(self, models: Collection[str]) -> None:
        self._threads = ThreadPoolExecutor(THREADS_PER_MODEL * max(1, len(models)), "disk")
        self._turns = {model: asyncio.Lock() for model in models}
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, work: Callable[[], T]) -> T:
        """Like `asyncio.to_thread`, except that `stop` waits for a thread whose caller was
        cancelled."""
        return await asyncio.shield(self._begun(work))

    async def run_in_turn(self, model: str, work: Callable[[], T]) -> T:
        """Runs the lookups for requests of one model one at a time, so that they take one thread. A
        cancelled caller gives up its turn; work that has begun is completed."""
        turn = self._turns[model]
        await turn.acquire()
        running = self._begun(work)
        running.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(running)

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)

    def _begun(self, work: Callable[[], T]) -> asyncio.Future[T]:
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        return running


class UpstreamModel:
    def __init__(self, spec: ModelSpec, upstream: UpstreamSpec) -> None:
        """Raises SettingsError for an unknown family."""
        self.id, self.spec, self.upstream = spec.id, spec, upstream
        self.connection = UpstreamConnection(spec.id, upstream)
        self.text_family = text_family(spec.family)
        """The family by which its text is parsed if the other server has tool calling."""
        self.opening = opening_of_reasoning(spec.family)
        """The delimiter that opens reasoning in its text; empty if a family has none."""
        self.thoughts = thought_tags(spec.family)
        """The tags by which two requests can limit its reasoning; None if its family has none."""

    @property
    def can(self) -> UpstreamCapabilities:
        return self.connection.capabilities

    @property
    def family(self) -> ModelFamily:
        """The family by which its text is parsed."""
        return self.text_family if self.can.tools else self.text_family.with_tools_in_prompt()

    @property
    def context_length(self) -> int | None:
        return self.spec.context_length or self.connection.learnt.context_length

    @property
    def capabilities(self) -> Capabilities:
        """What clients see of the model. What is not known of it is taken to be possible."""
        return Capabilities(
            family=self.spec.family or self.family.name,
            architecture="",
            quantization=None,
            size_bytes=0,
            context_length=self.context_length,
            reasoning=True,
            tools=True,
            structured_output=True,
            fill_in_the_middle=self.can.completions,
        )

    @property
    def view(self) -> "ModelView":
        return ModelView(
            spec=self.spec,
            family=self.capabilities.family,
            state=self.connection.state,
            leases=self.connection.running,
            last_used=self.connection.last_used,
            error=self.connection.last_error,
        )


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
    last_used: float | None
    """The Unix time of its last use, in seconds."""
    error: str | None
    nbytes: int = 0
    stale_at: float | None = None
    """The Unix time at which it is unloaded if no request uses it before."""
    progress: LoadProgress | None = None
    adapters: Sequence[tuple[str, int, int]] = ()
    """The name, leases and bytes of each adapter in memory."""
    batching: bool | None = None
    """Whether its answers are computed in one batch; None until it has been loaded once."""
    prefilling: tuple[PrefillView, ...] = ()
    """The rows in prefill, in order of arrival."""

    @property
    def is_preloading(self) -> bool:
        """Whether the server loads it for the first time, without a request."""
        at_start = self.spec.preload and self.last_used is None
        return at_start and self.state in ("preparing", "loading")


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

    @property
    def context_length(self) -> int | None:
        """The model's context length in tokens. If models.yaml does not set it, it is None until
        the model's files have been read."""
        return self.prepared.context_length if self.prepared else self.spec.context_length

    def look_for_capabilities(self) -> None:
        """Reads the files, unless they are those in which none were found: a template that does not
        end takes its whole time limit whenever it is read."""
        stamp = stamp_on_disk(self.spec)
        if stamp is None or stamp != self.unreadable:
            self.capabilities = capabilities_on_disk(self.spec)
            self.unreadable = None if self.capabilities else stamp

    def adapter_names(self) -> list[str]:
        """Reads the names of the usable adapters on disk."""
        if self.prepared:
            catalog = self.prepared.adapters
        else:  # the catalog is kept since it caches the files that it has read
            catalog = self.on_disk = self.on_disk or catalog_on_disk(self.spec)
        specs = catalog.all() if catalog else {}
        return [name for name, spec in specs.items() if isinstance(spec, AdapterSpec)]


class ServedModels:
    def __init__(self, specs: Iterable[ModelSpec]) -> None:
        """Raises SettingsError for an unknown family."""
        self._entries = {
            spec.id: PoolEntry(
                spec, upstream=UpstreamModel(spec, spec.upstream) if spec.upstream else None
            )
            for spec in specs
        }
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

    @property
    def specs(self) -> list[ModelSpec]:
        return [entry.spec for entry in self]

    @property
    def replays(self) -> list[str]:
        """The ids of the replay models."""
        return [spec.id for spec in self.specs if spec.source.startswith(REPLAY)]

    def reset_replay(self, id: str) -> None:
        """Makes a replay model start its transcript from the beginning."""
        prepared = self[id].prepared
        if prepared and prepared.transcript:
            prepared.transcript.reset()

    def spec(self, name: str) -> ModelSpec:
        """The spec of the model with this id or alias. Raises ModelNotFound."""
        return self.find(name).spec

    def upstream(self, name: str) -> UpstreamModel | None:
        """The upstream model with this id or alias, which an adapter's name may follow; None for
        any other name."""
        base, _ = self.split(name)
        return self.find(base).upstream if base in self else None

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
        split, and has no adapter. `latest` is Ollama's word for none."""
        model, _, adapter = name.rpartition(":")
        is_both = adapter and name not in self._names and model in self._names
        return (model, None if adapter == "latest" else adapter) if is_both else (name, None)


log = logging.getLogger("mlx_server.pool")

Report = Callable[[str, int, int], None]
"""Arguments: description of the work, amount done, total amount."""


class ModelPreparation:
    def __init__(
        self,
        disk: DiskThreads,
        engine: Callable[[], EngineClient],
        running: Callable[[], Awaitable[EngineClient]],
        policy: Callable[[], Policy],
        check_open: Callable[[], None],
        on_progress: OnProgress,
    ) -> None:
        """running: waits for the next engine if the present one is lost. Raises EngineDied.
        check_open: raises the error for requests to a server that is stopping."""
        self._disk = disk
        self._engine = engine
        self._running = running
        self._policy = policy
        self._check_open = check_open
        self._on_progress = on_progress
        self.upcast = False

    async def prepared(self, entry: PoolEntry) -> PreparedModel:
        """Downloads and reads the model's files, once for all requests. Raises ServerError if they
        can't be used.

        Replaced files are read again while the model is not in memory. A loaded model is served
        unchanged until it is unloaded.
        """
        self._check_open()
        if entry.model:
            return entry.model.prepared
        if entry.preparing:
            await self._forget_if_replaced(entry, entry.preparing)
        if entry.preparing is None:
            entry.preparing = asyncio.create_task(self._prepare(entry))
            # retrieves an error, which is logged already, in case all requests were cancelled
            entry.preparing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(entry.preparing)

    async def _forget_if_replaced(
        self, entry: PoolEntry, known: asyncio.Task[PreparedModel]
    ) -> None:
        is_read = known.done() and not known.cancelled()
        if not is_read or self._policy().models[entry.spec.id].state != "unloaded":
            return
        look = partial(is_current, known.result())
        is_replaced = not await self._disk.run_in_turn(entry.spec.id, look)
        if is_replaced and entry.preparing is known:
            log.info("the files of %s were replaced", entry.spec.id)
            entry.preparing = None

    async def _prepare(self, entry: PoolEntry) -> PreparedModel:
        report = self.reporter(entry)
        entry.failure = None
        try:
            ranks = len(group.hosts) if (group := entry.spec.group) else 1
            prepared = await self._disk.run(
                partial(
                    prepare,
                    entry.spec,
                    report,
                    upcast=self.upcast,
                    budget=ranks * self._policy().budget or None,
                    unusable=entry.unusable,
                )
            )
            if prepared.transcript is None:  # a replay model has no KV cache to measure
                kv = await self._kv_cost(prepared)
                weights = prepared.weights // ranks
                most_padding = kv.most_padding(self._policy().budget - weights)
                prepared = replace(prepared, kv=kv, most_padding=most_padding, weights=weights)
        except asyncio.CancelledError:
            self._check_open()
            raise
        except Exception as error:
            entry.preparing = None  # the next request tries again
            failure = self.failed(entry, error)
            raise failure from None
        if prepared.adapters and entry.prepared and entry.prepared.adapters:
            prepared.adapters.added = entry.prepared.adapters.added
        entry.prepared, entry.progress = prepared, None
        self._policy().estimate(entry.spec.id, prepared.weights)
        return prepared

    async def _kv_cost(self, prepared: PreparedModel) -> KvCost:
        spec, path = prepared.spec, str(prepared.path)
        command = MeasureCache(prepared.id, path, spec.kv_bits, spec.compute_dtype)
        for is_last in (False, True):
            engine = await self._running()
            try:
                with _stamped(prepared):
                    return await engine.kv_cost(command)
            except EngineDied:
                if is_last:
                    raise
        raise AssertionError

    def failed(self, entry: PoolEntry, error: Exception) -> ServerError:
        """Logs the error, and records in the entry the one to report to clients, which it also
        returns. An unexpected error is only in the log."""
        if isinstance(error, ModelUnusable) and error.stamp:
            entry.unusable, entry.preparing = copy(error), None
        if isinstance(error, ServerError):
            log.error("%s: %s", entry.spec.id, error.message)
        else:
            log.error("%s can't be used", entry.spec.id, exc_info=error)
            error = ServerError(
                f"{entry.spec.id} can't be used because of an unexpected error. See the server's "
                "log."
            )
        entry.failure, entry.progress = copy(error), None
        return error

    async def load(self, prepared: PreparedModel, report: Report) -> ModelLoaded:
        """Loads the weights. Raises ModelReplaced if the files have changed since they were
        prepared."""
        await self._disk.run(partial(check_files, prepared))
        with _stamped(prepared):
            command = LoadModel(
                prepared.id,
                str(prepared.path),
                sorted(prepared.family.stops(prepared.checkpoint)),
                str(prepared.tokenizer_json.parent),
                prepared.spec.kv_bits,
                prepared.most_padding,
                prepared.spec.compute_dtype,
                sees=prepared.vision is not None,
                speculation=prepared.spec.speculation == "auto",
            )
            loaded = await self._engine().load(
                command, lambda done, total: report("loading", done, total)
            )
        try:
            await self._disk.run(partial(check_files, prepared))
        except ModelReplaced:
            await self._engine().unload(prepared.id)
            raise
        return loaded

    def reporter(self, entry: PoolEntry) -> Report:
        def report(what: str, done: int, total: int) -> None:
            self._check_open()  # its error ends a download when the server stops
            entry.progress = LoadProgress(what, done, total)
            self._on_progress(entry.spec.id, what, done, total)

        return report


@contextmanager
def _stamped(prepared: PreparedModel) -> Iterator[None]:
    """Gives an error that is due to the model's files their stamp."""
    try:
        yield
    except ModelUnusable as error:
        if error.of_files:
            error.stamp = prepared.stamp
        raise


def progress_display() -> OnProgress:
    return BarProgress() if sys.stderr.isatty() else LogLineProgress()


class LogLineProgress:
    """Logs a line at the start, at each quarter and at the end."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, str], int] = {}
        """The last quarter that was logged, by model and kind of work."""

    def __call__(self, model: str, what: str, done: int, total: int) -> None:
        quarter = 4 * done // total if total else 4
        if self._logged.get((model, what)) != quarter:
            self._logged[model, what] = quarter
            log.info("%s: %s %d %%", model, what, quarter * 25)


class BarProgress:
    def __init__(self) -> None:
        # imported here since a server without a terminal starts faster without rich
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # a file or pipe has to get its lines itself
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def __call__(self, model: str, what: str, done: int, total: int) -> None:
        if (model, what) not in self._tasks:
            self._progress.start()
            self._tasks[model, what] = self._progress.add_task(f"{model}: {what}")
        self._progress.update(self._tasks[model, what], completed=done, total=total)
        if self._progress.finished:
            self._progress.stop()
