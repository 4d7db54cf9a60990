"""The bodies that are taken, and those that are refused before the model is asked."""

from typing import Any

import pytest
from pydantic import ValidationError

from mlx_server.api.embeddings import EmbeddingsBody


@pytest.mark.parametrize(
    "change",
    [
        {"input": None},
        {"input": 5},
        {"input": {"text": "a"}},
        {"input": ["a", 5]},
        {"input": [1, "a"]},
        {"input": [1.0]},
        {"input": [True]},
        {"input": [-1]},
        {"input": [10**30]},
        {"input": [[1], "a"]},
        {"input": [[[1]]]},
        {"model": ""},
        {"encoding_format": "int8"},
        {"dimensions": 0},
        {"dimensions": 2**31},
        {"dimensions": True},
        {"prompt_name": 5},
        {"truncate": "END"},
    ],
)
def test_what_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EmbeddingsBody.model_validate({"model": "m", "input": "a", **change})


@pytest.mark.parametrize(
    "change",
    [
        {"input": [[], [1]]},
        {"dimensions": 2**31 - 1},
        {"encoding_format": None, "dimensions": None, "prompt_name": None, "truncate": None},
    ],
)
def test_what_is_taken(change: dict[str, Any]) -> None:
    body = EmbeddingsBody.model_validate({"model": "m", "input": "a", "user": "u", **change})
    assert body.ignored() == []
