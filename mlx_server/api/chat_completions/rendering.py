"""A request's prompt without an answer: `POST /v1/chat/completions/render` as vLLM shows it, and
`POST /apply-template` as llama.cpp does."""

import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from mlx_server.generation.tokenization import dry_run
from mlx_server.pool.prepare import PreparedModel
from mlx_server.requests import GenerateRequest

Rendering = Callable[[PreparedModel, GenerateRequest], tuple[dict[str, Any], tuple[str, ...]]]
"""Makes the body, and the names of the parameters that the template does not read."""


def prompt_only(
    prepared: PreparedModel, request: GenerateRequest
) -> tuple[dict[str, Any], tuple[str, ...]]:
    planned = dry_run(prepared, request)
    prompt = prepared.checkpoint.tokenizer.raw(planned.rows[0].prompt)
    return {"prompt": prompt}, planned.ignored


def rendered(
    prepared: PreparedModel, request: GenerateRequest
) -> tuple[dict[str, Any], tuple[str, ...]]:
    planned = dry_run(prepared, request)
    row = planned.rows[0]
    sampling = {
        **asdict(row.sampling),
        "n": request.n,
        "max_tokens": row.max_tokens,
        "stop": list(request.stop),
        "stop_token_ids": row.stop_tokens,
    }
    body = {
        "request_id": f"chatcmpl-{uuid.uuid4().hex}",
        "model": prepared.id,
        "prompt": prepared.checkpoint.tokenizer.raw(row.prompt),
        "token_ids": row.prompt,
        "features": None,
        "sampling_params": sampling,
    }
    return body, planned.ignored
