"""Converts a rerank body to a `RerankRequest`."""

from mlx_server.api.rerank.protocol import RerankBody
from mlx_server.generation.rerank import RerankRequest


def to_request(body: RerankBody, client: str) -> RerankRequest:
    return RerankRequest(
        model=body.model,
        query=body.query,
        documents=tuple(each.text for each in body.documents),
        instruction=body.instruction,
        client=client,
    )
