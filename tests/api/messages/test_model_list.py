from typing import Any

import pytest

from mlx_server.api.messages.routes import model_info, page

MODELS = [{"id": f"m{i}"} for i in range(50)]


def ids(**query: str) -> tuple[list[str], bool]:
    found = page(MODELS, query)
    names = [model["id"] for model in found["data"]]
    assert (found["first_id"], found["last_id"]) == (names[0], names[-1])
    return names, found["has_more"]


@pytest.mark.parametrize(
    ("query", "expected", "has_more"),
    [
        ({}, range(20), True),
        ({"limit": "50"}, range(50), False),
        ({"limit": "1000"}, range(50), False),
        ({"limit": "2", "after_id": "m5"}, range(6, 8), True),
        ({"after_id": "m29"}, range(30, 50), False),
        ({"limit": "2", "before_id": "m5"}, range(3, 5), True),
        ({"before_id": "m5"}, range(5), False),
    ],
)
def test_pages(query: dict[str, str], expected: Any, has_more: bool) -> None:
    assert ids(**query) == ([f"m{i}" for i in expected], has_more)


def test_every_model_is_on_one_page() -> None:
    found, more = ids(limit="7")
    while more:
        names, more = ids(limit="7", after_id=found[-1])
        found += names
    assert found == [model["id"] for model in MODELS]


def test_an_empty_page() -> None:
    nothing: dict[str, Any] = {"data": [], "first_id": None, "last_id": None, "has_more": False}
    assert page(MODELS, {"after_id": "m49"}) == nothing
    assert page([], {}) == nothing


def test_a_context_that_is_not_known_yet() -> None:
    info = model_info({"id": "m", "created": 0}, None)
    assert (info["max_input_tokens"], info["created_at"]) == (None, "1970-01-01T00:00:00Z")
