"""`POST /v1/rerank` on the wire, as Jina and Cohere document it."""

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from fastapi import Request, Response
from pydantic import BeforeValidator, Field

from mlx_server import limits
from mlx_server.api.fields import WHOLE, Items, WireModel, ignored_header
from mlx_server.api.handlers import documented, json_response, read, while_connected
from mlx_server.generation.rerank import Relevance, RerankRequest, rerank
from mlx_server.http.metrics import Metrics
from mlx_server.http.security import keyed_router, wants
from mlx_server.pool.pool import Pool
from mlx_server.request_threads import in_thread, in_thread_if_large
from mlx_server.requests import DETERMINISTIC_HEADER


class RankedDocument(WireModel):
    text: str


def _object_of(value: Any) -> Any:
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise ValueError("should be a string, or an object with `text`")
    return value


TextOrDocument = Annotated[
    RankedDocument, BeforeValidator(_object_of, json_schema_input_type=str | RankedDocument)
]


class RerankBody(WireModel):
    ACCEPTED: ClassVar[frozenset[str]] = frozenset({"user"})

    model: Annotated[str, Field(min_length=1)]
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[
        Items[TextOrDocument],
        Field(min_length=1, max_length=limits.EMBEDDING_INPUTS),
    ]
    top_n: Annotated[int, Field(ge=1), WHOLE] | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    """Tells the model what makes a document relevant; by default, that it answers a web search."""


def ranked(relevance: Relevance, documents: Sequence[str], body: RerankBody) -> dict[str, Any]:
    best = sorted(range(len(documents)), key=lambda index: -relevance.scores[index])[: body.top_n]
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": relevance.scores[index]} for index in best
    ]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": body.model,
        "usage": {"prompt_tokens": relevance.tokens, "total_tokens": relevance.tokens},
        "results": results,
    }


PATH = "/v1/rerank"

router = keyed_router()


@router.post(PATH, openapi_extra=documented(PATH, RerankBody))
async def ranks(http: Request) -> Response:
    body = await read(http, RerankBody)
    pool: Pool = http.app.state.pool
    metrics: Metrics = http.app.state.metrics
    request = RerankRequest(
        model=body.model,
        query=body.query,
        documents=tuple(each.text for each in body.documents),
        instruction=body.instruction,
        client=http.state.client,
        deterministic=wants(http, DETERMINISTIC_HEADER),
    )
    scoring = metrics.answers.counted(rerank(request, pool), request.client)
    relevance = await while_connected(http, scoring)
    answer = await in_thread(ranked, relevance, request.documents, body)
    return json_response(answer, ignored_header(await in_thread_if_large(body.ignored)))
