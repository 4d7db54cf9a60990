"""The shortest number that several schemas allow."""

from typing import Any

import pytest

from mlx_server.schemas.shortest_number import shortest_number


@pytest.mark.parametrize(
    ("parts", "whole", "text"),
    [
        ([{}], False, "0"),
        ([{"minimum": -5}, {"maximum": 5}], True, "0"),
        ([{"minimum": 1000}], False, "1000"),
        ([{"exclusiveMinimum": 9}, {"maximum": 12}], True, "10"),
        ([{"minimum": 1, "exclusiveMinimum": True}], False, "2"),
        ([{"exclusiveMinimum": 0, "exclusiveMaximum": 1}], False, "0.1"),
        ([{"exclusiveMinimum": 0, "exclusiveMaximum": 1}], True, None),
        ([{"exclusiveMinimum": 0.55, "maximum": 0.56}], False, "0.56"),
        ([{"minimum": 1000, "multipleOf": 35}], True, "1015"),
        ([{"multipleOf": 0.25}, {"minimum": 0.3}], False, "1"),
        ([{"minimum": 3}, {"maximum": 2}], True, None),
        ([{"minimum": 1.5, "maximum": 1.75}], True, None),
    ],
)
def test_it_lies_between_all_bounds(
    parts: list[dict[str, Any]], whole: bool, text: str | None
) -> None:
    assert shortest_number(parts, whole=whole) == text
