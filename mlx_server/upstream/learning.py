"""Reads the context length and the capabilities of a model in an upstream's `/models`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_server.upstream.spec import SEEN

CONTEXTS = (
    *("max_model_len", "context_length", "loaded_context_length", "max_context_length"),
    *("context_window", "n_ctx", "n_ctx_train"),
)
"""Fields that may have the context length, the more exact ones first."""

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "tools": ("tools",),
    "tool_choice": ("tool_choice",),
    "json_schema": ("structured_outputs",),
    "reasoning_effort": ("reasoning",),
    "sampling": ("top_k", "min_p", "repetition_penalty"),
    "penalties": ("presence_penalty", "frequency_penalty"),
    "seed": ("seed",),
    "stop": ("stop",),
    "logit_bias": ("logit_bias",),
    "logprobs": ("logprobs", "top_logprobs"),
}
"""Capabilities, and the parameters that `supported_parameters` must list for each."""

_VLLM = dict.fromkeys(
    ("structured_outputs", "chat_template_kwargs", "continue_message", "special_tokens"), True
)

OWNERS: Mapping[str, Mapping[str, bool]] = {
    "vllm": _VLLM,
    "sglang": {"special_tokens": True},
    "llamacpp": {"chat_template_kwargs": True},
    "me": {"json_schema": False},  # llama-cpp-python, which fails for a schema
    "mlx-server": {**_VLLM, **dict.fromkeys(("reasoning_messages", "developer_role"), True)},
}
"""Capabilities of servers, by the `owned_by` of their models."""


@dataclass(frozen=True)
class LearntFacts:
    context_length: int | None = None
    capabilities: Mapping[str, bool] = field(default_factory=dict)


def facts_in(models: Any, name: str) -> LearntFacts:
    """The facts about the model of this name, or about the only one in the list."""
    listed = models.get("data") if isinstance(models, Mapping) else models
    entries = [e for e in listed if isinstance(e, Mapping)] if isinstance(listed, list) else []
    entry = next((e for e in entries if e.get("id") == name), None)
    if entry is None and len(entries) == 1:
        entry = entries[0]
    return LearntFacts(_context(entry), _capabilities(entry)) if entry else LearntFacts()


def _context(entry: Mapping[str, Any]) -> int | None:
    meta = entry.get("meta")
    places = [entry, meta] if isinstance(meta, Mapping) else [entry]
    found = (place.get(name) for name in CONTEXTS for place in places)
    return next((n for n in found if type(n) is int and 0 < n < 2**31), None)


def _capabilities(entry: Mapping[str, Any]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    supported = entry.get("supported_parameters")
    if isinstance(supported, list) and supported:
        for name, needed in PARAMETERS.items():
            found[name] = all(each in supported for each in needed)
    owner = entry.get("owned_by")
    found |= OWNERS.get(owner, {}) if isinstance(owner, str) else {}
    found |= _modalities(entry)
    abilities = entry.get("capabilities")
    if owner == "mlx-server" and isinstance(abilities, Mapping):
        found["thinking_budget"] = abilities.get("reasoning") is True
    return found


def _modalities(entry: Mapping[str, Any]) -> dict[str, bool]:
    """The media that the model takes: OpenRouter and others list them, llama.cpp and LM Studio say
    only that it takes images."""
    inner = entry.get("architecture")
    lists = [each.get("input_modalities") for each in (entry, inner) if isinstance(each, Mapping)]
    listed = next((each for each in lists if isinstance(each, list)), None)
    if listed is not None:
        return {capability: name in listed for name, capability in SEEN.items()}
    abilities = entry.get("capabilities")
    is_multimodal = isinstance(abilities, list) and "multimodal" in abilities
    return {"images": True} if is_multimodal or entry.get("type") == "vlm" else {}
