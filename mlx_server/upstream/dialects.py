"""What is known of the servers that upstreams are: URLs, fields, ends of answers, capabilities."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_server.upstream.spec import SEEN, UpstreamSpec

WATSONX_VERSION = "2025-02-11"

WATSONX_CHAT = "/ml/v1/text/chat_stream"

CHAT, COMPLETIONS, MODELS = "/chat/completions", "/completions", "/models"


def endpoint(spec: UpstreamSpec, route: str) -> str:
    if spec.kind == "watsonx":
        return f"{spec.url}{WATSONX_CHAT}?version={WATSONX_VERSION}"
    return f"{spec.url}{route}"


def body_for(spec: UpstreamSpec, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with the model, and with the field names of this kind of upstream."""
    if spec.kind == "openai":
        return {"model": spec.model, **body, "stream": True}
    owner = {"project_id": spec.project_id} if spec.project_id else {"space_id": spec.space_id}
    request = {"model_id": spec.model, **owner, **body}
    choice = request.pop("tool_choice", None)
    if isinstance(choice, str):  # watsonx has one field for a string and one for an object
        request["tool_choice_option"] = choice
    elif choice is not None:
        request["tool_choice"] = choice
    return request


ENDS = ("stop", "length", "tool_calls", "content_filter", "error")
"""The reasons that all servers have in common."""

OTHER_ENDS: Mapping[str, str] = {
    "function_call": "tool_calls",
    "abort": "error",
    "cancelled": "error",
    "time_limit": "length",
    "max_tokens": "length",
    "end_turn": "stop",
    "tool_use": "tool_calls",
    **dict.fromkeys(
        ("safety", "recitation", "blocklist", "prohibited_content", "spii"), "content_filter"
    ),
}
"""The reasons of OpenAI's older models, vLLM, watsonx, Anthropic and Gemini, in lower case, and
OpenAI's for each. A URL does not say which server it is, and a gateway passes on what it gets, so
those of any one are read from all."""

REASONING = ("reasoning_content", "reasoning")
"""The fields of a message that may have its reasoning as text. Ollama and OpenRouter have only the
second one, llama.cpp and watsonx only the first, vLLM and LM Studio either."""

DETAILS = "reasoning_details"
"""OpenRouter's field of the reasoning in signed parts, which must be sent back."""

LONGEST_NAME = 100
"""The characters of a reason that are read."""


def reason_of_end(reason: object) -> str | None:
    """A `finish_reason` as OpenAI's if it is known, else as the upstream names it; None if the
    answer has not ended."""
    if not isinstance(reason, str) or not reason:
        return None
    # Gemini adds the cause, as in `content_filter: SAFETY`
    name = reason[:LONGEST_NAME].partition(":")[0].strip().lower()
    return OTHER_ENDS.get(name, name)


CONTEXTS = (
    *("max_model_len", "context_length", "loaded_context_length", "max_context_length"),
    *("n_ctx", "n_ctx_train"),
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
    sizes = (place.get(name) for name in CONTEXTS for place in places)
    return next((n for n in sizes if type(n) is int and 0 < n < 2**31), None)


def _capabilities(entry: Mapping[str, Any]) -> dict[str, bool]:
    capabilities: dict[str, bool] = {}
    supported = entry.get("supported_parameters")
    if isinstance(supported, list) and supported:
        for name, needed in PARAMETERS.items():
            capabilities[name] = all(each in supported for each in needed)
    owner = entry.get("owned_by")
    capabilities |= OWNERS.get(owner, {}) if isinstance(owner, str) else {}
    capabilities |= _modalities(entry)
    abilities = entry.get("capabilities")
    if owner == "mlx-server" and isinstance(abilities, Mapping):
        capabilities["thinking_budget"] = abilities.get("reasoning") is True
    return capabilities


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
