"""`POST /v1/chat/completions/render`: a request's prompt, without an answer, as vLLM shows it."""

import uuid
from dataclasses import asdict
from typing import Any

from mlx_server.generation.tokenization import dry_run
from mlx_server.pool.prepare import PreparedModel
from mlx_server.requests import GenerateRequest


def rendered(
    prepared: PreparedModel, request: GenerateRequest
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The body, and the names of the parameters that the template does not read."""
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
