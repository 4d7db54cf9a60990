"""`GET /v1/pool`: the models and adapters in memory, for the server's owner."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from mlx_server.api.handlers import json_response
from mlx_server.pool.models import ModelView
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec

router = APIRouter()


@router.get("/v1/pool")
async def pool(http: Request) -> Response:
    return json_response({"object": "pool", **shown(http.app.state.pool)})


def shown(found: Pool) -> dict[str, Any]:
    return {
        "memory": found.memory(),
        "engine": _engine(found),
        "models": [_model(view) for view in found.views()],
    }


def _engine(found: Pool) -> dict[str, Any] | None:
    """The engine's current long operation, such as compiling a grammar, and its seconds so far."""
    doing = found.supervisor.doing
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
        "kv_bits": view.spec.kv_bits,  # null: as they are computed
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
