"""The inputs of a body: a text, token ids, or several of them."""

from typing import Any

import pytest

from mlx_server import limits
from mlx_server.api.embeddings import EmbeddingsBody, to_request
from mlx_server.errors import BadRequest


def inputs(given: Any) -> Any:
    body = EmbeddingsBody.model_validate({"model": "m", "input": given})
    return to_request(body, "me").inputs


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        ("", ("",)),
    ],
)
def test_a_list_of_token_ids_is_one_input(given: Any, expected: Any) -> None:
    assert inputs(given) == expected


@pytest.mark.parametrize("count", [0, limits.EMBEDDING_INPUTS + 1])
def test_there_are_some_inputs_and_not_too_many(count: int) -> None:
    with pytest.raises(BadRequest, match=f"has {count} inputs") as refused:
        inputs(["a"] * count)
    assert refused.value.param == "input"
