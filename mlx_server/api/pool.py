"""Routes about what is in memory: `GET /v1/pool` for the server's owner, those that load and unload
models and, as vLLM's, adapters, `GET /health`, the only route that needs no key, and `GET
/version`."""

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from mlx_server import __version__, limits
from mlx_server.api.fields import WireModel, ignored_header
from mlx_server.api.handlers import documented, json_response, read, while_connected
from mlx_server.api.models import served
from mlx_server.errors import BadRequest, Forbidden
from mlx_server.http.security import keyed_router
from mlx_server.pool.memory import processes
from mlx_server.pool.models import ModelView
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import REPLAY, ModelSpec

router = keyed_router()


@router.get("/v1/pool")
async def pool(http: Request) -> Response:
    sizes = await asyncio.to_thread(processes)  # it reads the table of all processes
    return json_response({"object": "pool", **shown(http.app.state.pool), "processes": sizes})


def shown(pool: Pool) -> dict[str, Any]:
    return {
        "memory": pool.memory(),
        "disk_writes": _disk_writes(pool),
        "engine": _engine(pool),
        "training": asdict(pool.training) if pool.training else None,
        "models": [_model(view) for view in pool.views()],
    }


def _disk_writes(pool: Pool) -> dict[str, int] | None:
    """What all servers of the data directory wrote to the prompt cache's files."""
    writes = pool.disk_writes
    return {"today": writes.today, "per_day": writes.most} if writes else None


def _engine(pool: Pool) -> dict[str, Any] | None:
    """The engine's current long operation, such as compiling a grammar, and its seconds so far."""
    doing = pool.supervisor.doing
    if doing is None:
        return None
    seconds = doing.seconds(asyncio.get_running_loop().time())
    return {"doing": doing.what, "seconds": round(seconds, 1)}


def _model(view: ModelView) -> dict[str, Any]:
    return {
        "id": view.spec.id,
        "aliases": view.spec.aliases,
        "family": view.family,
        "source": _source(view.spec),
        "state": view.state,
        "leases": view.leases,
        "bytes": view.nbytes,
        "last_used": _whole(view.last_used),
        "stale_at": _whole(view.stale_at),  # when it is unloaded, if no request comes before
        "pinned": view.spec.pinned,
        "ttl": view.spec.ttl,
        "batching": view.batching,
        "compute_dtype": view.spec.compute_dtype,
        "kv_bits": view.spec.kv_bits,  # null: as they are computed
        "deterministic": view.spec.deterministic,
        "progress": asdict(view.progress) if view.progress else None,
        "prefilling": [asdict(row) for row in view.prefilling],
        "error": view.error,
        "adapters": [
            {"name": name, "leases": leases, "bytes": nbytes}
            for name, leases, nbytes in view.adapters
        ],
    }


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds)


def _source(spec: ModelSpec) -> str:
    """Hides the owner's folders and servers from clients: a path is cut to its last part, and of a
    URL only the model's name there is shown."""
    if spec.upstream:
        return f"{spec.upstream.kind}:{spec.upstream.model}"
    kind, colon, path = spec.source.rpartition(":")
    return kind + colon + (Path(path).name if path.startswith("/") else path)


LOAD_MODEL, UNLOAD_MODEL = "/v1/models/load", "/v1/models/unload"
"""rapid-mlx's paths. llama.cpp's have no `/v1`, and LM Studio's have an `/api` in front."""


class UnloadBody(WireModel):
    model: str | None = None
    instance_id: str | None = None
    """LM Studio's name for it: a model is loaded only once here."""


class LoadBody(UnloadBody):
    echo_load_config: bool | None = None


@router.post(LOAD_MODEL, openapi_extra=documented(LOAD_MODEL, LoadBody))
async def load_model(http: Request) -> Response:
    """Answers when the model is loaded, in the words of all three servers."""
    body = await read(http, LoadBody)
    pool: Pool = http.app.state.pool
    id = _runtime_model(http, body)
    began = time.monotonic()
    await while_connected(http, pool.load(id, http.state.client))
    capabilities = await pool.capabilities(id)
    embeds = capabilities is not None and capabilities.task == "embed"
    config = {"load_config": {"context_length": pool.models[id].context_length}}
    loaded = {
        "success": True,
        "id": id,
        "instance_id": id,
        "type": "embedding" if embeds else "llm",
        "status": "loaded",
        "load_time_seconds": round(time.monotonic() - began, 3),
        **(config if body.echo_load_config else {}),
    }
    return json_response(loaded, ignored_header(body.ignored()))


@router.post(UNLOAD_MODEL, openapi_extra=documented(UNLOAD_MODEL, UnloadBody))
async def unload_model(http: Request) -> Response:
    """The model leaves memory as soon as no request uses it."""
    body = await read(http, UnloadBody)
    id = _runtime_model(http, body)
    _unload(http, id)
    unloaded = {"success": True, "id": id, "instance_id": id}
    return json_response(unloaded, ignored_header(body.ignored()))


@router.delete("/v1/models/{name:path}")
async def delete_model(name: str, http: Request) -> Response:
    """rapid-mlx's way to unload a model, whose files stay."""
    check_runtime_models(http)
    id, adapter = await served(http.app.state.pool, name)
    if adapter:
        raise BadRequest(f"{adapter[:100]!r} is an adapter: unload it with `{UNLOAD}`.")
    _unload(http, id)
    return Response(status_code=204)


def _runtime_model(http: Request, body: UnloadBody) -> str:
    check_runtime_models(http)
    if not (name := body.model or body.instance_id):
        raise BadRequest("`model` is missing: it names the model.", param="model")
    pool: Pool = http.app.state.pool
    return pool.models.spec(pool.models.split(name)[0]).id


def _unload(http: Request, id: str) -> None:
    pool: Pool = http.app.state.pool
    check_not_pinned(pool, id, "model")
    pool.keep(id, 0)


def check_runtime_models(http: Request) -> None:
    if not http.app.state.runtime_models:
        raise Forbidden(
            "Clients of this server may not load or unload models: the requests that need a model "
            "load it. Its owner can allow that: `runtime_models: true` under `server` in "
            "models.yaml."
        )


def check_not_pinned(pool: Pool, id: str, param: str) -> None:
    if pool.models.spec(id).pinned:
        raise BadRequest(
            f"{id} is `pinned` in models.yaml: only its owner can unload it.", param=param
        )


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

Name = Annotated[str, Field(min_length=1)]
AdapterPath = Annotated[str, Field(min_length=1, max_length=limits.ADAPTER_PATH_CHARACTERS)]
"""The limit is the longest path that systems allow: looking up a path takes time quadratic in its
length."""

adapters_router = keyed_router()


class Unload(WireModel):
    lora_name: Name
    model: Name | None = None
    """May be left out if only one model with weights is served."""


class Load(Unload):
    lora_path: AdapterPath


@adapters_router.post(LOAD, openapi_extra=documented(LOAD, Load))
async def load(http: Request) -> Response:
    body = await read(http, Load)
    pool: Pool = http.app.state.pool
    id = _only_model(pool, body)
    spec = await pool.add_adapter(id, body.lora_name, body.lora_path)
    loaded = {"id": f"{id}:{spec.name}", "parent": id, "digest": spec.digest}
    return json_response(loaded, ignored_header(body.ignored()))


@adapters_router.post(UNLOAD, openapi_extra=documented(UNLOAD, Unload))
async def unload(http: Request) -> Response:
    body = await read(http, Unload)
    pool: Pool = http.app.state.pool
    id = _only_model(pool, body)
    await pool.remove_adapter(id, body.lora_name)
    unloaded = {"id": f"{id}:{body.lora_name}", "parent": id, "unloaded": True}
    return json_response(unloaded, ignored_header(body.ignored()))


def _only_model(pool: Pool, body: Unload) -> str:
    if body.model:
        return pool.models.spec(body.model).id
    served = [
        entry.spec.id for entry in pool.models.local if not entry.spec.source.startswith(REPLAY)
    ]
    if len(served) != 1:
        raise BadRequest(
            f"Set `model` to the model that the adapter is for: {', '.join(served) or 'none'}.",
            param="model",
        )
    return served[0]


health_router = APIRouter()
keyed = keyed_router()


@health_router.get("/health")
async def health(http: Request) -> Response:
    """Whether the engine is alive and has what it loads at its start, and what else doesn't work,
    without names: it needs no key."""
    pool: Pool = http.app.state.pool
    views = list(pool.views())
    if not pool.healthy:
        return json_response({"status": "engine_died"}, status=503)
    if any(each.is_preloading for each in views):  # llama.cpp's status; a client asks again
        return json_response({"status": "loading"}, {"retry-after": "1"}, status=503)
    problems = []
    if http.app.state.runs.store.trouble:
        problems.append("The store of responses can't be used: the log says why.")
    if silent := sum(each.state == "unavailable" for each in views):
        problems.append(f"Models whose server does not answer: {silent}. /v1/pool has them.")
    body: dict[str, Any] = {"status": "ok"}
    if problems:
        body = {"status": "degraded", "problems": problems}
    if unasked := sum(each.state == "unasked" for each in views):
        body["notes"] = [f"Models whose server was not asked yet: {unasked}. /v1/pool has them."]
    return json_response(body)


@keyed.get("/version")
async def version() -> Response:
    """The server's version, as vLLM reports its own."""
    return json_response({"version": __version__})
