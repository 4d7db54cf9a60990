"""The models as Ollama lists and describes them."""

import hashlib
from typing import Any

from mlx_server.api.ollama.output import rfc3339
from mlx_server.errors import AdapterNotFound, served_names
from mlx_server.pool.models import ModelView
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import Capabilities

Wire = dict[str, Any]

LATEST = ":latest"
"""The tag that Ollama's clients add to a name without one."""

NEVER = "9999-12-31T23:59:59Z"
"""The expiry of a model that is only unloaded if memory is needed."""

ABILITIES = {"tools": "tools", "reasoning": "thinking"}
"""Fields of `Capabilities`, and what Ollama calls them."""


def own_name(pool: Pool, name: str) -> str:
    """The name by which the pool knows the model, with its adapter."""
    is_tagged = name.endswith(LATEST) and name not in pool.models
    return name.removesuffix(LATEST) if is_tagged else name


async def checked(pool: Pool, name: str) -> str:
    """The id of the model with this name. Raises ModelNotFound or AdapterNotFound."""
    base, adapter = pool.models.split(name)
    id = pool.models.spec(base).id
    if adapter and adapter not in (names := await pool.adapter_names(id)):
        sentence = f"{id} has no adapter {adapter[:100]!r}. {served_names(adapter, names)}"
        raise AdapterNotFound(sentence, param="model")
    return id


async def listed(pool: Pool, started: float) -> list[Wire]:
    """Every model, and each with its adapters as `model:adapter`."""
    return [
        {**await _model(pool, view, name), "modified_at": rfc3339(started)}
        for view in pool.views()
        for name in (view.spec.id, *await _with_adapters(pool, view.spec.id))
    ]


async def running(pool: Pool) -> list[Wire]:
    views = (view for view in pool.views() if view.state == "ready")
    return [
        {
            **await _model(pool, view, view.spec.id),
            "expires_at": NEVER if view.stale_at is None else rfc3339(view.stale_at),
            "size_vram": view.nbytes,
            "context_length": pool.models[view.spec.id].context_length,
        }
        for view in views
    ]


async def described(pool: Pool, id: str, started: float) -> Wire:
    found = await pool.capabilities(id)
    family = found.family if found else ""
    length = found.context_length if found else None
    context = {f"{family}.context_length": length} if length else {}
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "modified_at": rfc3339(started),
        "details": _details(found),
        "model_info": {"general.architecture": family, "general.basename": id, **context},
        "capabilities": _abilities(found),
    }


async def _with_adapters(pool: Pool, id: str) -> list[str]:
    return [f"{id}:{adapter}" for adapter in await pool.adapter_names(id)]


async def _model(pool: Pool, view: ModelView, name: str) -> Wire:
    spec = view.spec
    entry = f"{name}\n{spec.source}\n{spec.revision}"
    return {
        "name": name,
        "model": name,
        "size": view.nbytes,
        # of the entry in models.yaml: clients only compare it
        "digest": hashlib.sha256(entry.encode()).hexdigest(),
        "details": _details(await pool.capabilities(spec.id)),
    }


def _details(found: Capabilities | None) -> Wire:
    """Each is empty while the model's files are not on this machine."""
    family = found.family if found else ""
    return {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": (found and found.quantization) or "",
    }


def _abilities(found: Capabilities | None) -> list[str]:
    if found and found.task != "generate":
        return ["embedding"] if found.task == "embed" else []
    abilities = [name for field, name in ABILITIES.items() if found and getattr(found, field)]
    return ["completion", *abilities]
