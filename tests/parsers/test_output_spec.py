"""Whether an answer has to be a call."""

import pytest

from mlx_server.parsers.parse_context import OutputSpec, ParseContext
from mlx_server.requests import NamedTool, ToolChoice


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("auto", False), ("none", False), ("required", True), (NamedTool("none"), True)],
)
def test_a_call_is_required_by_choice_or_by_name(choice: ToolChoice, expected: bool) -> None:
    assert OutputSpec(ParseContext(), choice=choice).must_call is expected
