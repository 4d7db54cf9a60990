"""The bodies that are taken, and those that are refused before the model is asked."""

from typing import Any

import pytest
from pydantic import ValidationError

from mlx_server import limits
from mlx_server.api.rerank import RerankBody, to_request

GIVEN: dict[str, Any] = {"model": "m", "query": "q", "documents": ["a"]}


@pytest.mark.parametrize(
    "change",
    [
        {"query": ""},
        {"query": ["q"]},
        {"model": ""},
        {"documents": "a"},
        {"documents": []},
        {"documents": ["a"] * (limits.EMBEDDING_INPUTS + 1)},
        {"documents": ["a", None]},
        {"documents": ["a", 5]},
        {"documents": [["a"]]},
        {"documents": [{}]},
        {"documents": [{"text": 5}]},
        {"documents": [{"text": None}]},
        {"top_n": 0},
        {"top_n": True},
        {"top_n": 1.0},
        {"top_n": "1"},
        {"return_documents": 1},
        {"instruction": 5},
    ],
)
def test_what_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RerankBody.model_validate({**GIVEN, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"documents": [""]},
        {"documents": ["a"] * limits.EMBEDDING_INPUTS},
        {"top_n": 10**30},
        {"top_n": None, "return_documents": None, "instruction": None},
    ],
)
def test_what_is_taken(change: dict[str, Any]) -> None:
    RerankBody.model_validate({**GIVEN, **change})


def test_fields_next_to_a_documents_text_are_reported_once() -> None:
    documents = [{"text": "a", "id": 1}, "b", {"text": "c", "id": 2}]
    body = RerankBody.model_validate({**GIVEN, "documents": documents, "user": "u", "max": 3})
    assert sorted(body.ignored()) == ["documents.id", "max"]
    assert to_request(body, "me").documents == ("a", "b", "c")
