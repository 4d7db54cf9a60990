"""`/v1/fine_tuning/jobs` as OpenAI documents it: trains LoRA adapters while nobody waits.

One job runs at a time, in a process of its own that stops between two steps while answers are
generated. What a job needs to go on is on disk: the server that is started next, or another one of
the data directory, takes it over.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import aclosing, suppress
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query, Request, Response
from pydantic import Field

from mlx_server import limits
from mlx_server.api.accumulator import Wire
from mlx_server.api.fields import WireModel, ignored_header
from mlx_server.api.file_inputs import disk_errors, find_file_for
from mlx_server.api.files import new_file, new_file_id, shown_name
from mlx_server.api.handlers import documented, json_response, read
from mlx_server.api.pool import check_runtime_models
from mlx_server.api.responses.protocol import Metadata
from mlx_server.api.stored import After, page_body, store_of
from mlx_server.api.training_data import STORED, samples_of, stored_lines
from mlx_server.engine.training import Evaluated, TrainingMethod, TrainingProcess
from mlx_server.errors import (
    BadRequest,
    NotFound,
    Overloaded,
    ServerError,
    StoreUnavailable,
    TrainingDataInvalid,
    TrainingFailed,
)
from mlx_server.generation.training import Training, check_trainable, split
from mlx_server.http.security import keyed_router
from mlx_server.models.adapter_catalog import check_name
from mlx_server.pool.memory import footprint
from mlx_server.pool.pool import Pool, TrainingProgress
from mlx_server.pool.scheduler import cancelled
from mlx_server.request_threads import in_thread
from mlx_server.store import Record, Store

log = logging.getLogger("mlx_server.training")

Status = Literal["queued", "running", "succeeded", "failed", "cancelled"]
ENDED = frozenset({"succeeded", "failed", "cancelled"})
KIND: Literal["fine-tuning job"] = "fine-tuning job"

LOOK_SECONDS = 0.05
"""How soon after the beginning of an answer the training pauses."""
IDLE_SECONDS = 2.0
"""How long no answer is generated before it goes on."""
STORED_SECONDS = 1.0
"""How often a job's progress is stored, and its cancellation seen."""
LEARNING_RATE = 1e-4

Auto = Literal["auto"]
Whole = Annotated[int, Field(ge=1, le=1000)]


class Hyperparameters(WireModel):
    """OpenAI's, and those of `mlx_lm.lora`."""

    n_epochs: Whole | Auto = "auto"
    batch_size: Whole | Auto = "auto"
    learning_rate_multiplier: Annotated[float, Field(gt=0, le=1000)] | Auto = "auto"
    rank: Annotated[int, Field(ge=1, le=limits.ADAPTER_RANK)] = TrainingMethod().rank
    layers: Annotated[int, Field(ge=-1, le=limits.CHECKPOINT_LAYERS)] = TrainingMethod().layers
    kind: Literal["lora", "dora"] = "lora"


class Supervised(WireModel):
    hyperparameters: Hyperparameters = Hyperparameters()


class MethodParam(WireModel):
    type: Literal["supervised"]
    supervised: Supervised = Supervised()


class JobBody(WireModel):
    model: str
    training_file: str
    validation_file: str | None = None
    suffix: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    hyperparameters: Hyperparameters | None = None
    method: MethodParam | None = None
    metadata: Metadata | None = None

    def parameters(self) -> Hyperparameters:
        if self.method:
            return self.method.supervised.hyperparameters
        return self.hyperparameters or Hyperparameters()


class FineTuningJob(msgspec.Struct, kw_only=True):
    """A job as it is stored."""

    id: str
    created_at: int
    model: str
    name: str
    """The adapter's name."""
    training_file: str
    validation_file: str | None
    epochs: int
    method: TrainingMethod
    multiplier: float
    metadata: dict[str, str] | None = None
    status: Status = "queued"
    finished_at: int | None = None
    error: dict[str, Any] | None = None
    trained_tokens: int | None = None
    evaluated: list[Evaluated] = []
    events: list[Wire] = []

    @property
    def adapter(self) -> str:
        return f"{self.model}:{self.name}"

    def tell(self, message: str, level: str = "info", data: Wire | None = None) -> None:
        event = {
            "object": "fine_tuning.job.event",
            "id": f"ftevent-{secrets.token_hex(12)}",
            "created_at": int(time.time()),
            "level": level,
            "message": message,
            "type": "metrics" if data else "message",
            "data": data or {},
        }
        self.events = [*self.events, event][-limits.TRAINING_EVENTS :]

    def end(self, status: Status) -> None:
        self.status, self.finished_at = status, int(time.time())

    def wire(self) -> Wire:
        hyperparameters = {
            "n_epochs": self.epochs,
            "batch_size": self.method.batch_size,
            "learning_rate_multiplier": self.multiplier,
        }
        return {
            "object": "fine_tuning.job",
            "id": self.id,
            "model": self.model,
            "created_at": self.created_at,
            "finished_at": self.finished_at,
            "fine_tuned_model": self.adapter if self.status == "succeeded" else None,
            "organization_id": "mlx-server",
            "result_files": [],
            "status": self.status,
            "training_file": self.training_file,
            "validation_file": self.validation_file,
            "hyperparameters": hyperparameters,
            "method": {
                "type": "supervised",
                "supervised": {"hyperparameters": hyperparameters},
            },
            "trained_tokens": self.trained_tokens,
            "error": self.error,
            "seed": self.method.seed,
            "estimated_finish": None,
            "integrations": [],
            "metadata": self.metadata,
        }

    def checkpoints(self) -> list[Wire]:
        return [
            {
                "object": "fine_tuning.job.checkpoint",
                "id": f"ftckpt-{self.id.removeprefix('ftjob-')}-{each.step}",
                "created_at": self.finished_at or self.created_at,
                "fine_tuned_model_checkpoint": self.adapter,
                "fine_tuning_job_id": self.id,
                "step_number": each.step,
                "metrics": {"step": each.step, "full_valid_loss": each.held_out},
            }
            for each in self.evaluated
            if each.step
        ]

    def record(self) -> Record:
        status = "completed" if self.status in ENDED else "in_progress"
        return Record(KIND, self.id, self.created_at, msgspec.json.encode(self), status)


def job_of(body: bytes) -> FineTuningJob:
    return msgspec.json.decode(body, type=FineTuningJob)


class GivingWay:
    """Pauses a training while answers are generated."""

    def __init__(self, pool: Pool, process: TrainingProcess) -> None:
        self._pool, self._process = pool, process
        self._busy_at = -inf

    def look(self) -> None:
        if self._pool.row_slots.taken:
            self._busy_at = time.monotonic()
        is_busy = time.monotonic() - self._busy_at < IDLE_SECONDS
        if is_busy and not self._process.is_paused:
            self._process.pause()
        elif self._process.is_paused and not is_busy:
            self._process.go_on()


class FineTuning:
    """Runs the jobs of all clients, one after the other."""

    def __init__(
        self,
        pool: Pool,
        store: Store,
        owners: Mapping[str, object],
        folder: Path,
        adapters: Path | None,
    ) -> None:
        """owners: those whose keys this server knows. folder: for the state of trainings.
        adapters: where adapters are published; None if the server has no folder of them."""
        self._pool = pool
        self._store = store
        self._owners = owners
        self._folder = folder
        self._adapters = adapters
        self._turn = asyncio.Lock()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._learning = ""
        """The job that learns, or was the last to do so: it sees in the store that it is ended."""

    def check_room(self) -> None:
        if len(self._running) >= (most := limits.TRAINING_JOBS):
            raise Overloaded(f"{most} jobs wait already. Try again when one has ended.")

    def check_free(self, name: str) -> None:
        """Raises BadRequest if no adapter of this name can be published."""
        if self._adapters is None:
            raise BadRequest(
                "The server has no folder for adapters. Its owner can name one: `adapters_dir` "
                "under `server` in models.yaml."
            )
        if (self._adapters / name).exists():
            raise BadRequest(f"There is an adapter {name!r}. Choose another one.", param="suffix")

    async def adopt(self) -> None:
        """Goes on with the jobs of servers that have ended."""
        with suppress(StoreUnavailable):  # the store has logged it
            for _, id, owner in await self._store.claim(self._owners.keys(), (KIND,)):
                self.start(id, owner)

    def start(self, id: str, owner: str) -> None:
        task = self._running[id] = asyncio.create_task(self._run(id, owner))
        task.add_done_callback(lambda _: self._running.pop(id, None))

    async def stop(self) -> None:
        """Leaves the jobs to the next server."""
        await cancelled(list(self._running.values()))

    async def edit(self, id: str, owner: str, change: Any) -> FineTuningJob:
        def changed(record: Record) -> Record:
            job = job_of(record.body)
            if job.status not in ENDED:
                change(job)
            return job.record()

        return job_of((await self._store.edit(KIND, id, owner, changed)).body)

    async def cancel(self, id: str, owner: str) -> FineTuningJob:
        def cancel(job: FineTuningJob) -> None:
            job.end("cancelled")
            job.tell("The job was cancelled.")

        job = await self.edit(id, owner, cancel)
        if id != self._learning and (task := self._running.get(id)):
            task.cancel()  # it waits or reads its data, and would keep its place
        return job

    async def _run(self, id: str, owner: str) -> None:
        def fail(job: FineTuningJob, message: str, code: str | None) -> None:
            job.end("failed")
            job.error = {"code": code, "message": message, "param": None}
            job.tell(message, "error")

        try:
            async with self._turn:
                await self._train(id, owner)
        except NotFound:  # deleted
            return
        except ServerError as error:
            message, code = error.message, error.code
            with suppress(ServerError):
                await self.edit(id, owner, lambda job: fail(job, message, code))
        except Exception as error:
            log.error("job %s ended with an error", id, exc_info=error)
            with suppress(ServerError):
                await self.edit(id, owner, lambda job: fail(job, "See the server's log.", None))

    async def _train(self, id: str, owner: str) -> None:
        def begin(job: FineTuningJob) -> None:
            if job.status == "queued":
                job.tell("The job has begun.")
            job.status = "running"

        job = await self.edit(id, owner, begin)
        if job.status in ENDED:
            return
        prepared = await self._pool.prepared(job.model)
        training = await in_thread(self._training, job, prepared)
        self._learning = id
        log.info("job %s trains %s in %d steps", id, job.adapter, training.job.steps)
        process = TrainingProcess(training.folder)
        progress = self._pool.training = TrainingProgress(job.adapter, training.job.steps)
        giving_way = GivingWay(self._pool, process)
        learning, stored = asyncio.create_task(_take(process, training)), 0.0
        try:
            while not learning.done():
                giving_way.look()
                progress.step, progress.loss = training.step, training.loss
                progress.is_paused = process.is_paused
                if time.monotonic() - stored > STORED_SECONDS:
                    progress.nbytes = footprint(process.pid) if process.pid else 0
                    job = await self.edit(id, owner, lambda job: _tell(job, training))
                    if job.status in ENDED:
                        return
                    stored = time.monotonic()
                await asyncio.wait({learning}, timeout=LOOK_SECONDS)
            learning.result()
            await self._finish(id, owner, training)
        except TrainingFailed:  # another job has another seed, and would not go on with it
            await asyncio.to_thread(training.drop)
            raise
        finally:
            await cancelled([learning])
            self._pool.training = None
            if job.status in ENDED:
                await asyncio.to_thread(training.drop)

    def _training(self, job: FineTuningJob, prepared: Any) -> Training:
        def samples(id: str) -> Any:
            with self._store.contents.open(id) as lines:
                return samples_of(prepared, lines)

        try:
            learnt = samples(job.training_file)
            held_out = samples(job.validation_file) if job.validation_file else []
        except FileNotFoundError:
            raise TrainingDataInvalid("A file of the job was deleted. Upload it again.") from None
        data = split(prepared, learnt, held_out, job.method.seed)
        return Training.of(self._folder, prepared, data, job.method, job.epochs)

    async def _finish(self, id: str, owner: str, training: Training) -> None:
        adapters = self._adapters
        assert adapters

        def end(job: FineTuningJob) -> None:
            _tell(job, training)
            job.trained_tokens = training.job.tokens
            if why := training.why_not():
                job.end("failed")
                job.error = {"code": "not_better", "message": why, "param": None}
                job.tell(f"No adapter was published. {why}", "warn")
            else:
                training.publish(adapters, job.name)
                job.end("succeeded")
                job.tell(f"{job.adapter} is published.")

        job = await self.edit(id, owner, end)
        await asyncio.to_thread(training.drop)
        log.info("job %s has %s", id, job.status)


async def _take(process: TrainingProcess, training: Training) -> None:
    async with aclosing(process.reports()) as reports:
        async for report in reports:
            training.take(report)


def _tell(job: FineTuningJob, training: Training) -> None:
    """Adds an event if there is news of the training."""
    known, job.evaluated = job.evaluated, list(training.evaluated)
    last = job.events[-1]["data"].get("step") if job.events else None
    if last == training.step and len(known) == len(job.evaluated):
        return
    data: Wire = {"step": training.step, "total_steps": training.job.steps}
    if training.loss is not None:
        data["train_loss"] = training.loss
    if training.evaluated and training.evaluated[-1].step == training.step:
        data["full_valid_loss"] = training.evaluated[-1].held_out
    job.tell(f"Step {training.step} of {training.job.steps}", data=data)


PATH = "/v1/fine_tuning/jobs"
ONE = PATH + "/{id}"
Limit = Annotated[int, Query(ge=1, le=100)]

router = keyed_router()


@router.post(PATH, openapi_extra=documented(PATH, JobBody))
async def create_job(http: Request) -> Response:
    check_runtime_models(http)
    body = await read(http, JobBody)
    pool: Pool = http.app.state.pool
    jobs: FineTuning = http.app.state.fine_tuning
    spec = pool.models.spec(body.model)
    check_trainable(spec)
    if stored := STORED.fullmatch(body.training_file):
        file = await _file_of_stored(http, *stored.groups())
        body = body.model_copy(update={"training_file": file})
    await find_file_for(http, body.training_file, "fine-tune", "training_file")
    if body.validation_file:
        await find_file_for(http, body.validation_file, "fine-tune", "validation_file")
    number = secrets.token_hex(8)
    name = re.sub(r"[^\w.+-]", "-", body.suffix, flags=re.ASCII) if body.suffix else f"ft-{number}"
    check_name(name)
    jobs.check_free(name)
    jobs.check_room()
    job = _job(body, spec.id, f"ftjob-{number}", name)
    job.tell("The job waits for its turn.")
    await store_of(http).add(job.record(), http.state.owner)
    jobs.start(job.id, http.state.owner)
    return json_response(job.wire(), ignored_header(body.ignored()))


async def _file_of_stored(http: Request, key: str, value: str) -> str:
    """Makes a training file of the client's stored chat completions, so that the job has the same
    samples for as long as it takes."""
    store, owner, id, nbytes = store_of(http), http.state.owner, new_file_id(), 0
    with disk_errors(), await asyncio.to_thread(store.contents.create, id) as content:
        try:
            async for line in stored_lines(store, owner, key, value):
                nbytes += content.write(line)
            if not nbytes:
                raise BadRequest(
                    f"You have no stored chat completion with {key}={value} in its metadata.",
                    param="training_file",
                )
            content.flush()
            file = new_file(store, id, "fine-tune", shown_name(f"{key}={value}.jsonl"), nbytes)
            await store.add_file(file, owner, nbytes)
        except BaseException:
            store.contents.remove([id])
            raise
    return id


def _job(body: JobBody, model: str, id: str, name: str) -> FineTuningJob:
    parameters = body.parameters()
    multiplier = parameters.learning_rate_multiplier
    factor = 1.0 if multiplier == "auto" else multiplier
    return FineTuningJob(
        id=id,
        created_at=int(time.time()),
        model=model,
        name=name,
        training_file=body.training_file,
        validation_file=body.validation_file,
        epochs=3 if parameters.n_epochs == "auto" else parameters.n_epochs,
        multiplier=factor,
        metadata=dict(body.metadata) if body.metadata else None,
        method=TrainingMethod(
            kind=parameters.kind,
            rank=parameters.rank,
            layers=parameters.layers,
            batch_size=TrainingMethod().batch_size
            if parameters.batch_size == "auto"
            else parameters.batch_size,
            learning_rate=LEARNING_RATE * factor,
            seed=secrets.randbits(31) if body.seed is None else body.seed,
        ),
    )


@router.get(PATH)
async def list_jobs(http: Request, after: After = None, limit: Limit = 20) -> Response:
    owner = http.state.owner
    page = await store_of(http).records(KIND, owner, after=after, limit=limit, order="desc")
    return json_response(page_body(page, lambda body: job_of(body).wire()))


@router.get(ONE)
async def retrieve_job(http: Request, id: str) -> Response:
    return json_response((await _find(http, id)).wire())


@router.post(ONE + "/cancel")
async def cancel_job(http: Request, id: str) -> Response:
    jobs: FineTuning = http.app.state.fine_tuning
    job = await jobs.cancel(id, http.state.owner)
    return json_response(job.wire())


@router.get(ONE + "/events")
async def list_events(http: Request, id: str, after: After = None, limit: Limit = 20) -> Response:
    return _page((await _find(http, id)).events[::-1], after, limit)


@router.get(ONE + "/checkpoints")
async def list_checkpoints(
    http: Request, id: str, after: After = None, limit: Limit = 10
) -> Response:
    return _page((await _find(http, id)).checkpoints()[::-1], after, limit)


def _page(items: list[Wire], after: str | None, limit: int) -> Response:
    ids = [item["id"] for item in items]
    if after and after not in ids:
        raise BadRequest(
            f"`after` is {after!r}, which is not in this list, or no more.", param="after"
        )
    begin = ids.index(after) + 1 if after else 0
    shown = items[begin : begin + limit]
    has_more = len(items) > begin + limit
    return json_response({"object": "list", "data": shown, "has_more": has_more})


async def _find(http: Request, id: str) -> FineTuningJob:
    return job_of((await store_of(http).get(KIND, id, http.state.owner)).body)
