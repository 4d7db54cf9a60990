"""The composition root: builds the app and the HTTP server from settings."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import anyio.lowlevel
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from mlx_server import __version__, limits
from mlx_server.api import (
    batches,
    completions,
    conversations,
    embeddings,
    files,
    fine_tuning,
    infill,
    models,
    native,
    ollama,
    replay,
    rerank,
    tokenize,
)
from mlx_server.api import pool as pool_api
from mlx_server.api.batch_runner import BatchRunner
from mlx_server.api.chat_completions import routes as chat_completions
from mlx_server.api.fine_tuning import FineTuning
from mlx_server.api.handlers import build_validators, describe_bodies, json_response
from mlx_server.api.messages import routes as messages
from mlx_server.api.page import routes as page
from mlx_server.api.page.routes import ModelFetches, PageStreams, page_routes
from mlx_server.api.responses import compact
from mlx_server.api.responses import routes as responses
from mlx_server.api.responses.runs import Runs
from mlx_server.config.settings import (
    ServerSettings,
    Settings,
    StoreSettings,
    connector,
    model_specs,
    pool_limits,
)
from mlx_server.errors import StoreUnavailable
from mlx_server.generation.relay import RowRelay
from mlx_server.generation.training import TRAINING
from mlx_server.grammars import compiled
from mlx_server.http import errors, metrics
from mlx_server.http.admission import Admission
from mlx_server.http.connections import http
from mlx_server.http.middleware import AccessLog, BasePaths, DiscreetLifespan
from mlx_server.http.resumable import ResumableStreams
from mlx_server.http.security import (
    SecurityMiddleware,
    Signer,
    authorise,
    authorised,
    client_states,
    secret_key,
)
from mlx_server.http.server import EXIT_CODES, HttpServer, LoopErrors
from mlx_server.http.web_sockets import web_sockets
from mlx_server.mcp import Connectors
from mlx_server.pool.models import OnProgress, progress_display
from mlx_server.pool.pool import AnswerRecorder, Pool
from mlx_server.pool.scheduler import BackgroundWork, cancelled
from mlx_server.sources.transcript import Recordings
from mlx_server.store import Store
from mlx_server.system import descriptors, logs
from mlx_server.system.handover import LogOptions, Succession, launcher
from mlx_server.system.keep_awake import KeepAwake, keep_awake_command
from mlx_server.system.listening_sockets import bound_sockets
from mlx_server.system.process import return_large_blocks
from mlx_server.system.servers import FOLDER as SERVERS_FOLDER

log = logging.getLogger("mlx_server")

PRUNE_SECONDS = 3600.0
WATCH_SECONDS = 1.0
BACKLOG = 16
"""Connections that are accepted before the next count of them."""


def create_app(
    settings: Settings,
    on_progress: OnProgress = lambda *progress: None,
    recordings: Mapping[str, Recordings] = MappingProxyType({}),
    recorder: AnswerRecorder | None = None,
) -> FastAPI:
    """recordings: what replay models play, by id, where it is not the file of their source.
    recorder: sees every answer."""
    server, pool = settings.server, _pool(settings, on_progress, recordings)
    awake = KeepAwake(keep_awake_command())
    pool.row_slots.on_change = awake.count
    pool.recorder = recorder
    data_dir = settings.store.data_dir
    configured = {name: connector(name, it, data_dir) for name, it in settings.connectors.items()}
    connectors = Connectors(configured, allow_private_urls=server.allow_private_urls)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        async with AsyncExitStack() as on:
            store = await on.enter_async_context(_opened(settings.store))
            pool.servers = store.servers
            app.state.runs = runs = Runs(store, server.concurrency)
            app.state.resumable = resumable = ResumableStreams()
            app.state.signer = Signer(await asyncio.to_thread(secret_key, settings.store.data_dir))
            on.push_async_callback(connectors.stop)
            on.callback(awake.stop)
            if first := launcher():
                store.servers.pid, store.servers.generation = first.pid, first.generation
            await pool.start()
            if first:  # until then the server before this one takes the requests
                await pool.preloaded()
            on.push_async_callback(pool.stop)
            clients = client_states(server.keys)
            # its rows make way for those of others
            app.state.batches = runner = BatchRunner(app, store, clients, server.concurrency)
            on.push_async_callback(runner.stop)
            folder = store.contents.data_dir / TRAINING
            tuning = FineTuning(pool, store, clients, folder, server.adapters_dir)
            app.state.fine_tuning = tuning
            on.push_async_callback(tuning.stop)
            app.state.relay = relay = BackgroundWork()
            on.push_async_callback(relay.stop)
            watching = asyncio.create_task(_watch(store, pool, (runner, tuning), relay))
            on.push_async_callback(cancelled, [watching])
            compiled.warm()
            building = asyncio.create_task(asyncio.to_thread(build_validators))
            on.push_async_callback(cancelled, [building])
            await anyio.lowlevel.checkpoint()  # anyio's backend is imported before it is needed
            on.push_async_callback(runs.stop)
            on.push_async_callback(resumable.stop)
            yield

    app = FastAPI(
        title="mlx-server",
        version=__version__,
        lifespan=lifespan,
        middleware=_middleware(server),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.authorise = authorise(server.keys, server.tiers)
    app.state.pool = pool
    app.state.connectors = connectors
    app.state.metrics = _metrics(server, pool)
    app.state.page_streams = PageStreams()
    app.state.keeps_conversations = server.page_has("conversations")
    app.state.model_fetches = ModelFetches()
    app.state.started = int(time.time())
    app.state.max_body_bytes = server.max_body_bytes
    app.state.picture_hosts = {host.lower() for host in server.picture_hosts}
    app.state.allow_private_urls = server.allow_private_urls
    app.state.reasoning_field = server.reasoning_field
    app.state.runtime_models = server.runtime_models
    errors.install(app)
    # FastAPI would make included routes anew, in the first request of each app
    app.router.routes.extend(_routes(server, pool))
    if server.page:
        index, *others = page_routes()
        app.router.routes.insert(0, index)  # to all but browsers, Ollama's `/` answers
        app.router.routes.extend(others)
    app.add_api_route(
        "/openapi.json", _openapi, include_in_schema=False, dependencies=[Depends(authorised)]
    )
    return app


def _pool(
    settings: Settings, on_progress: OnProgress, recordings: Mapping[str, Recordings]
) -> Pool:
    specs = [replace(s, recordings=recordings.get(s.id)) for s in model_specs(settings)]
    folders = settings.server.folders_of_adapters
    return Pool(specs, pool_limits(settings), on_progress, adapter_dirs=folders)


def _middleware(server: ServerSettings) -> list[Middleware]:
    security = Middleware(
        SecurityMiddleware,
        allowed_hosts=server.allowed_hosts,
        allowed_origins=server.allowed_origins,
        max_body_bytes=server.max_body_bytes,
        bound_host=server.host,
    )
    return [
        Middleware(DiscreetLifespan),
        Middleware(BasePaths),
        Middleware(AccessLog),
        security,
    ]


def _metrics(server: ServerSettings, pool: Pool) -> metrics.Metrics:
    measured = metrics.Metrics(pool)
    measured.answers.log.keeps_texts = server.page_has("texts")
    pool.events.step = measured.on_step
    pool.events.memory = measured.samples.memory
    pool.events.ahead = measured.engine.on_ahead
    pool.events.disk_cache = measured.engine.on_disk_cache
    return measured


def _routes(server: ServerSettings, pool: Pool) -> Iterator[BaseRoute]:
    keyed = [each.router for each in (chat_completions, completions, responses, conversations)]
    keyed += [each.router for each in (messages, native, models, metrics, pool_api, ollama)]
    keyed += [each.router for each in (tokenize, embeddings, rerank, infill, files, batches)]
    keyed += [compact.router, fine_tuning.router, pool_api.keyed]
    if server.page:
        keyed.append(page.router)
    if server.adapter_dirs:
        keyed.append(pool_api.adapters_router)
    if pool.models.replays:
        keyed.append(replay.router)
    for router in keyed:
        assert router.dependencies, "its routes would need no key"
        yield from router.routes
    yield from pool_api.health_router.routes


@asynccontextmanager
async def _opened(settings: StoreSettings) -> AsyncIterator[Store]:
    with nullcontext("") if settings.data_dir else TemporaryDirectory() as folder:
        kept = settings if settings.data_dir else replace(settings, data_dir=Path(folder))
        store = await Store.open(kept.path, kept)
        pruning = asyncio.create_task(_prune(store))
        try:
            yield store
        finally:
            await cancelled([pruning])
            await store.close()


async def _prune(store: Store) -> None:
    while True:
        with suppress(StoreUnavailable, OSError):  # the store has logged it
            await store.prune()
            await store.sweep()
        await asyncio.sleep(PRUNE_SECONDS)


async def _watch(
    store: Store,
    pool: Pool,
    jobs: Sequence[BatchRunner | FineTuning],
    relay: BackgroundWork,
) -> None:
    """Shares the memory with the other servers of the data directory, ends the responses of those
    that have ended, and goes on with their jobs, and with the rows of the one before this one if
    memory does not hold the models of both."""
    for each in jobs:
        await each.adopt()
    known: frozenset[str] = frozenset()
    while True:
        others = frozenset(await pool.share_memory())
        if known - others:
            with suppress(StoreUnavailable):  # the store has logged it
                await store.adopt()
                for each in jobs:
                    await each.adopt()
                known = others
        known |= others
        if (first := launcher()) and first.predecessors and pool.engines[0].lacks_memory:
            relay.begin(RowRelay(pool, first.predecessors.pop()).serve())
        await asyncio.sleep(WATCH_SECONDS)


def run(settings: Settings, log_file: Path | None = None) -> None:
    """Serves until SIGTERM or Ctrl-C, or until another process takes its place. Raises
    SettingsError if the server can't start."""
    served = settings.server
    first, log_options = launcher(), LogOptions(served.log_level, served.log_format)
    if log_file:
        log_options.file = str(log_file)
    address = f"{served.host}, port {served.port}"
    sockets = first.inherited(address) if first else bound_sockets(served.host, served.port)
    server = _prepared(settings, lambda: create_app(settings, progress_display()))
    if first:
        server.on_ready = partial(first.say, "ready")
        signal.signal(signal.SIGHUP, lambda *_: first.say("restart"))
        for signum, code in EXIT_CODES.items():
            _exit_after(signum, code)
        first.watch(server.leave, server.stop)
        server.run(sockets)
        os._exit(0)
    assert settings.store.data_dir is not None
    succession = Succession(
        address,
        [os.dup(each.fileno()) for each in sockets],
        [sys.executable, "-m", "mlx_server", *sys.argv[1:]],
        str(settings.store.data_dir / SERVERS_FOLDER),
        log_options,
        on_replaced=server.leave,
        on_lost=lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    server.on_stop = succession.stop
    hangup = partial(os.kill, os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGHUP, lambda *_: succession.hung_up(hangup))
    for signum, code in EXIT_CODES.items():
        _exit_after(signum, code, succession)
    server.run(sockets)
    succession.here_ended()
    os._exit(succession.code)


def run_app(settings: Settings, make_app: Callable[[], FastAPI]) -> None:
    """Serves until SIGTERM or Ctrl-C. Raises SettingsError if the server can't start."""
    sockets = bound_sockets(settings.server.host, settings.server.port)
    server = _prepared(settings, make_app)
    for signum, code in EXIT_CODES.items():
        _exit_after(signum, code)
    server.run(sockets)


def _prepared(settings: Settings, make_app: Callable[[], FastAPI]) -> HttpServer:
    logs.configure(settings.server.log_level, settings.server.log_format)
    most = descriptors.raise_soft_limit()
    descriptors.check_descriptors(most)
    if few := descriptors.warning(most):
        log.warning("%s; %s", few, descriptors.FIX)
    return_large_blocks()
    return server_of(settings, make_app())


def server_of(settings: Settings, app: FastAPI) -> HttpServer:
    served = settings.server
    most = descriptors.connections(descriptors.available())
    admission = Admission(most, descriptors.connections_per_address(most))
    sockets = web_sockets(served.receive_seconds, served.max_body_bytes, admission)
    config = uvicorn.Config(
        app,
        host=served.host,
        port=served.port,
        # h11, since httptools does not limit the size of headers
        http=http(served.receive_seconds, admission),
        log_config=None,
        access_log=False,
        server_header=False,
        ws=sockets,
        ws_max_size=served.max_body_bytes,  # each message is a request body
        ws_per_message_deflate=False,
        backlog=BACKLOG,
        timeout_keep_alive=limits.IDLE_SECONDS,
        timeout_graceful_shutdown=int(served.drain_seconds) + 5,
    )
    return HttpServer(config, app, served.drain_seconds)


def _exit_after(signum: signal.Signals, code: int, succession: Succession | None = None) -> None:
    """uvicorn raises the signal again after shutdown. The default action for SIGTERM would look
    like a crash, and sys.exit would wait for threads with a running download."""

    def end(*_: object) -> None:
        if succession:
            succession.code = succession.code or code
            succession.here_ended()
        os._exit(succession.code if succession else code)

    signal.signal(signum, end)


async def _openapi(http: Request) -> Response:
    return json_response(await asyncio.to_thread(_described, http.app))


def _described(app: FastAPI) -> dict[str, Any]:
    if not app.openapi_schema:
        describe_bodies(app.openapi())
    return app.openapi()
