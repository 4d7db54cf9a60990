"""The composition root: builds the app and the HTTP server from settings."""

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.middleware import Middleware

from mlx_server import __version__, limits
from mlx_server.api import adapters, errors, health, metrics, models, replay
from mlx_server.api import pool as pool_api
from mlx_server.api.access_log import AccessLog
from mlx_server.api.chat_completions import router as chat_completions
from mlx_server.api.completions import router as completions
from mlx_server.api.conversations import router as conversations
from mlx_server.api.handlers import json_response
from mlx_server.api.lifespan import DiscreetLifespan
from mlx_server.api.messages import router as messages
from mlx_server.api.native import router as native
from mlx_server.api.ollama import router as ollama
from mlx_server.api.responses import router as responses
from mlx_server.api.responses.runs import Runs
from mlx_server.api.security import SecurityMiddleware, authorise
from mlx_server.api.signatures import Signer
from mlx_server.api.transport.admission import Admission
from mlx_server.api.transport.handshake import handshaking
from mlx_server.api.transport.http import http
from mlx_server.api.transport.last_words import let_last_words_out
from mlx_server.api.transport.slow_clients import guard_slow_clients
from mlx_server.api.transport.web_sockets import web_sockets
from mlx_server.config.models_yaml import load_settings
from mlx_server.config.settings import (
    ConnectorSettings,
    ModelSettings,
    OAuthSettings,
    ServerSettings,
    Settings,
    StoreSettings,
)
from mlx_server.engine.client import NO_DISK, PromptDisk
from mlx_server.engine.messages import Schedule
from mlx_server.errors import ShuttingDown, StoreUnavailable
from mlx_server.mcp import ClientCredentials, Connector, Connectors
from mlx_server.pool.entry import OnProgress
from mlx_server.pool.pool import Pool, PoolLimits
from mlx_server.pool.prepare import AdapterSource, ModelSpec
from mlx_server.pool.progress import progress_display
from mlx_server.repair.allowed import RepairPolicy
from mlx_server.requests import SamplingChoices
from mlx_server.schemas import compiled
from mlx_server.store import Retention, Store
from mlx_server.system import allocator, descriptors, logs
from mlx_server.system.keep_awake import KeepAwake, keep_awake_command
from mlx_server.system.listening_sockets import bound, url_of
from mlx_server.system.secret_key import secret_key

log = logging.getLogger("mlx_server")

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where `mlx-server chat` looks for a server by default."""

EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: 130}
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
SILENCE_SECONDS = 60.0
"""Pause between log lines about refused connections."""
PRUNE_SECONDS = 3600.0
POLL_SECONDS = 0.1
COLLECTIONS = 5_000, 20, 100
"""Thresholds of Python's garbage collector: rare, since full collections pause the event loop."""


def create_app(settings: Settings, on_progress: OnProgress = lambda *progress: None) -> FastAPI:
    server = settings.server
    pool_limits = PoolLimits(
        concurrency=server.concurrency,
        queue=server.queue,
        schedule=Schedule(server.prefill_share, server.longest_gap),
        wait_seconds=server.wait_seconds,
        budget=server.memory_budget,
        wired=server.wired,
        prompt_cache=server.prompt_cache_memory,
        prompt_disk=_prompt_disk(settings),
    )
    specs = [_spec(id, model, server.adapters_dir) for id, model in settings.models.items()]
    pool = Pool(specs, pool_limits, on_progress, adapter_dirs=_adapter_dirs(server))
    awake = KeepAwake(keep_awake_command() if server.keep_awake else ())
    pool.on_rows = awake.count
    configured = {name: _connector(found) for name, found in settings.connectors.items()}
    connectors = Connectors(configured, allow_private_urls=server.allow_private_urls)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_exception_handler(_LoopErrors())
        async with AsyncExitStack() as on:
            store = await on.enter_async_context(_opened(settings.store))
            app.state.runs = runs = Runs(store, server.concurrency)
            app.state.signer = Signer(await asyncio.to_thread(secret_key, settings.store.data_dir))
            on.push_async_callback(connectors.stop)
            on.callback(awake.stop)
            await pool.start()
            on.push_async_callback(pool.stop)
            compiled.warm()
            on.push_async_callback(runs.stop)
            yield

    gate = Middleware(
        SecurityMiddleware,
        allowed_hosts=server.allowed_hosts,
        allowed_origins=server.allowed_origins,
        max_body_bytes=server.max_body_bytes,
        bound_host=server.host,
    )
    app = FastAPI(
        title="mlx-server",
        version=__version__,
        lifespan=lifespan,
        middleware=[Middleware(DiscreetLifespan), Middleware(AccessLog), gate],
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.pool = pool
    app.state.connectors = connectors
    app.state.max_body_bytes = server.max_body_bytes
    app.state.metrics = metrics.Metrics(pool)
    app.state.started = int(time.time())
    app.state.reasoning_field = server.reasoning_field
    pool.on_step = app.state.metrics.on_step
    pool.on_ahead = app.state.metrics.on_ahead
    pool.on_disk_cache = app.state.metrics.on_disk_cache
    errors.install(app)

    keyed = APIRouter(
        dependencies=[Depends(authorise([key.get_secret_value() for key in server.api_keys]))]
    )
    for router in (chat_completions, completions, responses, conversations, messages, native):
        keyed.include_router(router.router)
    for router in (models, metrics, pool_api, ollama):
        keyed.include_router(router.router)
    if server.runtime_adapters:
        keyed.include_router(adapters.router)
    if pool.replay_models:
        keyed.include_router(replay.router)
    keyed.add_api_route("/openapi.json", _openapi, include_in_schema=False)
    app.include_router(keyed)
    app.include_router(health.router)
    return app


class _LoopErrors:
    """asyncio's exception handler, without the task's arguments, which asyncio itself would log."""

    def __init__(self) -> None:
        self._next_time = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in EXHAUSTED):
            log.error("unhandled error in a background task", exc_info=error)
        elif loop.time() >= self._next_time:  # asyncio retries, so there may be many a second
            self._next_time = loop.time() + SILENCE_SECONDS
            log.error("new connections can't be accepted for now: %s", error.strerror)


@asynccontextmanager
async def _opened(settings: StoreSettings) -> AsyncIterator[Store]:
    with nullcontext("") if settings.data_dir else TemporaryDirectory() as folder:
        kept = settings if settings.data_dir else StoreSettings(data_dir=Path(folder))
        retention = Retention(settings.days, settings.count, settings.bytes, settings.bytes_per_key)
        store = await Store.open(kept.path, retention)
        pruning = asyncio.create_task(_prune(store))
        try:
            yield store
        finally:
            pruning.cancel()
            await asyncio.gather(pruning, return_exceptions=True)
            await store.close()


async def _prune(store: Store) -> None:
    while True:
        with suppress(StoreUnavailable):  # the store has logged it
            await store.prune()
        await asyncio.sleep(PRUNE_SECONDS)


def run(settings: Settings) -> None:
    """Serves until SIGTERM or Ctrl-C. Raises SettingsError if the server can't start."""
    logs.configure(settings.server.log_level, settings.server.log_format)
    most = descriptors.raise_soft_limit()
    descriptors.check(most)
    if few := descriptors.warning(most):
        log.warning("%s; %s", few, descriptors.FIX)
    allocator.return_large_blocks()
    sockets = bound(settings.server.host, settings.server.port)
    server = server_of(settings, create_app(settings, progress_display()))
    for signum, code in EXIT_CODES.items():
        _exit_after(signum, code)
    server.run(sockets)


def server_of(settings: Settings, app: FastAPI) -> "HttpServer":
    served = settings.server
    most = descriptors.connections(descriptors.available())
    admission = Admission(most, descriptors.connections_per_address(most))
    sockets = handshaking(
        web_sockets(served.receive_seconds, served.max_body_bytes),
        served.receive_seconds,
        admission,
    )
    config = uvicorn.Config(
        app,
        host=served.host,
        port=served.port,
        # h11, since httptools does not limit the size of headers
        http=guard_slow_clients(http(served.receive_seconds, admission), served.send_seconds),
        log_config=None,
        access_log=False,
        server_header=False,
        ws=guard_slow_clients(sockets, served.send_seconds),
        ws_max_size=served.max_body_bytes,  # each message is a request body
        ws_per_message_deflate=False,
        backlog=limits.ACCEPTED_AT_ONCE.value,
        timeout_keep_alive=limits.IDLE_SECONDS.value,
        timeout_graceful_shutdown=int(served.drain_seconds) + 5,
    )
    return HttpServer(config, app, served.drain_seconds)


def _exit_after(signum: signal.Signals, code: int) -> None:
    """uvicorn raises the signal again after shutdown. The default action for SIGTERM would look
    like a crash, and sys.exit would wait for threads with a running download."""
    signal.signal(signum, lambda *_: os._exit(code))


class HttpServer(uvicorn.Server):
    """Prints its URL; ends streams that outlast the drain time with an error event."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, drain_seconds: float) -> None:
        super().__init__(config)
        self._app = app
        self._drain_seconds = drain_seconds

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        # keeps the objects of the server itself out of further collections
        gc.collect()
        gc.freeze()
        # the many objects of a large body must not cause one collection after another
        gc.set_threshold(*COLLECTIONS)
        urls = []
        for server in getattr(self, "servers", []):
            _queue_in_kernel(server)
            urls.append(url_of(server.sockets[0]))
            _print_line(f"Listening on {urls[-1]}")
        if urls:
            _announce_models(self._app.state.pool, urls[0])

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        ending = asyncio.create_task(self._end_streams())
        for server in self.servers:  # no new connections; uvicorn would also cut off WebSockets
            server.close()
        draining = asyncio.create_task(self._app.state.runs.drain())
        while not (draining.done() or self.force_exit):
            await asyncio.wait({draining}, timeout=POLL_SECONDS)
        draining.cancel()
        await super().shutdown(sockets)
        ending.cancel()
        with suppress(asyncio.CancelledError):
            await ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal exits at once; MCP servers are ended by their guard processes."""
        if self.should_exit:
            self._app.state.pool.supervisor.kill()
            os._exit(EXIT_CODES[signal.Signals(sig)])
        super().handle_exit(sig, frame)

    async def _end_streams(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        pool: Pool = self._app.state.pool
        # answers that wait for an MCP server continue without it, until the pool ends them
        stopping = asyncio.create_task(self._app.state.connectors.stop())
        await pool.stop(ShuttingDown("The server is shutting down."))
        await let_last_words_out(self.server_state)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await stopping


def _announce_models(pool: Pool, url: str) -> None:
    """Prints a line for each model when it is ready for the first time."""
    announced: set[str] = set()

    def announce(id: str) -> None:
        if id not in announced:
            announced.add(id)
            flag = "" if url == DEFAULT_URL else f" --url {url}"
            _print_line(f"{id} is ready at {url}/v1; try: mlx-server chat {id}{flag}")

    for model in pool.loaded:
        announce(model.prepared.id)
    pool.on_ready = announce


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _queue_in_kernel(server: asyncio.Server) -> None:
    """Raises the kernel's queue of connections. asyncio's `backlog` also sets how many it accepts
    at once, and so has to stay small."""
    for listening in server.sockets:
        with socket.socket(fileno=os.dup(listening.fileno())) as same:
            same.listen(socket.SOMAXCONN)


def spec_named(config: Path | None, name: str) -> ModelSpec:
    """The model of models.yaml with this id or alias; else `name` is a folder or a hub id."""
    settings = load_settings(config)
    folder = settings.server.adapters_dir
    listed = {id: _spec(id, model, folder) for id, model in settings.models.items()}
    for spec in listed.values():
        if name in (spec.id, *spec.aliases):
            return spec
    ((id, model),) = load_settings(None, models=[name], environ={}).models.items()
    return _spec(id, model)


def _prompt_disk(settings: Settings) -> PromptDisk:
    folder = settings.prompt_folder
    return PromptDisk(folder, settings.server.prompt_cache.disk) if folder else NO_DISK


def _adapter_dirs(server: ServerSettings) -> tuple[Path, ...]:
    own = (server.adapters_dir,) if server.adapters_dir else ()
    return (*own, *server.adapter_dirs)


def _spec(id: str, model: ModelSettings, adapters_dir: Path | None = None) -> ModelSpec:
    defaults = model.defaults.model_dump(exclude_none=True)
    max_tokens = defaults.pop("max_tokens", None)
    return ModelSpec(
        id=id,
        source=str(model.source),
        revision=model.revision,
        aliases=model.aliases,
        family=model.family,
        chat_template=_file_text(model.chat_template),
        context_length=model.context_length,
        max_tokens=max_tokens,
        choices=cast(SamplingChoices, defaults),
        template_kwargs=model.template_kwargs,
        force_answer=model.lead_on,
        constrain_calls=model.constrain_calls,
        include_raw=model.include_raw,
        tools_in_prompt=model.tools_in_prompt,
        schema_in_prompt=model.schema_in_prompt,
        compute_ahead=model.compute_ahead,
        kv_bits=None if model.kv_cache.bits == 16 else model.kv_cache.bits,
        volatile_lines=model.volatile_lines,
        misplaced_calls=model.misplaced_calls,
        reasoning_tags=model.reasoning_tags,
        repair=RepairPolicy(**model.repair.model_dump(by_alias=True)),
        preload=model.preload,
        pinned=model.pinned,
        ttl=model.ttl,
        tokenizer=str(model.tokenizer) if model.tokenizer else None,
        adapters={
            name: AdapterSource(a.path, a.pinned, a.allow_other_base, a.description)
            for name, a in model.adapters.items()
        },
        adapters_dir=adapters_dir,
    )


def _connector(found: ConnectorSettings) -> Connector:
    return Connector(
        url=found.url,
        command=(found.command, *found.args) if found.command else (),
        env={name: value.get_secret_value() for name, value in found.env.items()},
        headers={name: value.get_secret_value() for name, value in found.headers.items()},
        allow_private=found.allow_private,
        oauth=_credentials(found.oauth) if found.oauth else None,
    )


def _credentials(found: OAuthSettings) -> ClientCredentials:
    secret = found.client_secret.get_secret_value()
    return ClientCredentials(found.issuer, found.client_id, secret)


def _file_text(path: Path | None) -> str | None:
    return path.read_text("utf-8") if path else None


async def _openapi(http: Request) -> Response:
    app: FastAPI = http.app
    return json_response(app.openapi())
