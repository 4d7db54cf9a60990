"""Bounds of integers that are no doubles: nothing beyond them is taken, and little else refused."""

from typing import Any

import pytest

from mlx_server.grammars.formats import schema_unenforced
from mlx_server.requests import JsonFormat
from tests.grammars.matching import matcher_of, matches

LONG = {"minimum": -(2**63), "maximum": 2**63 - 1}


@pytest.mark.parametrize(
    ("bounds", "taken", "refused"),
    [
        (LONG, [-(2**63) + 1024, 0, 2**63 - 1], [-(2**63) - 1, 2**63, 2**64]),
        ({"minimum": 0, "maximum": 2**63 - 1}, [0, 2**63 - 1], [-1, 2**63]),
        ({"maximum": 2**53 + 3}, [-5, 2**53 + 2], [2**53 + 4]),
        ({"minimum": -(2**53) - 3}, [5, -(2**53) - 2], [-(2**53) - 4]),
        ({"maximum": 10**18}, [10**18], [10**18 + 1]),
        ({"maximum": 1e18}, [10**18], [10**18 + 1]),
        ({"exclusiveMaximum": 2**53 - 1}, [2**53 - 2], [2**53 - 1]),
    ],
)
def test_wide_bounds_are_enforced(
    bounds: dict[str, Any], taken: list[int], refused: list[int]
) -> None:
    asked = {"type": "integer", **bounds}
    assert not schema_unenforced(asked)
    matcher = matcher_of(JsonFormat(asked))
    assert all(matches(matcher, str(one)) for one in taken)
    assert not any(matches(matcher, str(one)) for one in refused)


@pytest.mark.parametrize(
    "asked",
    [
        {"type": "integer", "exclusiveMaximum": -(2**53)},
        {"type": "integer", "exclusiveMinimum": 2**53},
        {"type": "integer", "exclusiveMaximum": 1e17},
        {"type": "integer", "minimum": 2**53 + 1},
        {"type": "integer", "maximum": 2**64 - 1},
        {"type": "number", "maximum": 2**60},
        {"type": "integer", "maximum": 2**60, "exclusiveMaximum": True},
    ],
)
def test_others_are_named(asked: dict[str, Any]) -> None:
    """Plain llguidance takes a value that does not conform, or far too few that do."""
    assert schema_unenforced(asked)
    matcher_of(JsonFormat(asked, strict=False))
