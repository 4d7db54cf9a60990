"""A body becomes a request, with the documents in their order."""

from mlx_server.api.rerank import RerankBody, to_request
from mlx_server.generation.rerank import RerankRequest


def test_nothing_is_lost_and_documents_that_are_alike_stay_apart() -> None:
    body = RerankBody.model_validate(
        {"model": "m", "query": " q\n", "documents": ["a", "a", {"text": ""}], "instruction": ""}
    )
    assert to_request(body, "me") == RerankRequest(
        model="m", query=" q\n", documents=("a", "a", ""), instruction="", client="me"
    )
