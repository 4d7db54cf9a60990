"""The ranks of documents on the wire, the most relevant document first."""

import uuid
from collections.abc import Sequence
from typing import Any

from mlx_server.api.rerank.protocol import RerankBody
from mlx_server.generation.rerank import Relevance


def ranked(found: Relevance, documents: Sequence[str], body: RerankBody) -> dict[str, Any]:
    best = sorted(range(len(documents)), key=lambda index: -found.scores[index])[: body.top_n]
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": found.scores[index]} for index in best
    ]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": body.model,
        "usage": {"prompt_tokens": found.tokens, "total_tokens": found.tokens},
        "results": results,
    }
