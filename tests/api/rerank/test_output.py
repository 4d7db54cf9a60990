"""Documents by their scores, the best first."""

from typing import Any

from mlx_server.api.rerank import RerankBody, ranked, to_request
from mlx_server.generation.rerank import Relevance

GIVEN: dict[str, Any] = {"model": "m", "query": "q", "documents": ["a", {"text": "b"}, "c"]}


def results(**more: Any) -> list[Any]:
    body = RerankBody.model_validate({**GIVEN, **more})
    documents = to_request(body, "me").documents
    assert documents == ("a", "b", "c")
    found = ranked(Relevance("m", (0.1, 0.9, 0.5), 7), documents, body)
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    return list(found["results"])


def test_the_best_come_first_and_have_their_index() -> None:
    assert results() == [
        {"index": 1, "relevance_score": 0.9},
        {"index": 2, "relevance_score": 0.5},
        {"index": 0, "relevance_score": 0.1},
    ]
    assert [each["index"] for each in results(top_n=2)] == [1, 2]


def test_documents_are_returned_where_they_are_asked_for() -> None:
    assert results(return_documents=True, top_n=1)[0]["document"] == {"text": "b"}
