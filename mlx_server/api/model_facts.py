"""What `/v1/models` says of a model, in the fields that clients of other servers read."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from mlx_server.pool.prepare import Capabilities, Task

ABILITIES = ("reasoning", "tools", "structured_output")

TYPES: Mapping[Task, str] = {"generate": "llm", "embed": "embeddings", "rerank": "rerank"}
OUTPUTS: Mapping[Task, str] = {"generate": "text", "embed": "embeddings", "rerank": "rerank"}

GENERATION_PARAMS = (
    *("max_tokens", "stop", "seed", "logit_bias", "logprobs", "top_logprobs"),
    *("temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
TASK_PARAMS: Mapping[Task, tuple[str, ...]] = {
    "generate": GENERATION_PARAMS,
    "embed": ("encoding_format", "dimensions", "prompt_name", "truncate"),
    "rerank": ("top_n", "return_documents", "instruction"),
}
ABILITY_PARAMS: Mapping[str, tuple[str, ...]] = {
    "reasoning": ("reasoning", "reasoning_effort"),
    "tools": ("tools", "tool_choice", "parallel_tool_calls"),
    "structured_output": ("response_format", "structured_outputs"),
}
"""Parameters of chat completions that need an ability of the model."""


def described(found: Capabilities | None) -> dict[str, Any]:
    """Each is null while the model's files are not on this machine."""
    known = asdict(found) if found else {}
    context = known.get("context_length")
    return {
        "family": known.get("family"),
        "context_length": context,
        "capabilities": {name: known.get(name) for name in ABILITIES},
        # vLLM's
        "max_model_len": context,
        # LM Studio's
        "type": TYPES[found.task] if found else "llm",
        "arch": known.get("architecture"),
        "compatibility_type": "mlx",
        "quantization": known.get("quantization"),
        "size_bytes": known.get("size_bytes"),
        "max_context_length": context,
        # OpenRouter's
        "architecture": {**_modalities(found), "tokenizer": known.get("architecture")},
        "supported_parameters": list(_parameters(found)) if found else None,
    }


def _modalities(found: Capabilities | None) -> dict[str, Any]:
    output = OUTPUTS[found.task] if found else "text"
    return {
        "modality": f"text->{output}",
        "input_modalities": ["text"],
        "output_modalities": [output],
    }


def _parameters(found: Capabilities) -> Iterator[str]:
    unread = {"instruction"} if found.is_encoder else set()
    yield from (name for name in TASK_PARAMS[found.task] if name not in unread)
    if found.task != "generate":
        return
    for ability, names in ABILITY_PARAMS.items():
        if getattr(found, ability):
            yield from names
