"""Arguments within one key are found; an argument of any other kind stays as it is."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.repair.calls import WRAPPERS, unwrapped

KNOWN = ("city", "unit")


@pytest.mark.parametrize(
    ("key", "value", "inside"),
    [
        ("arguments", {"city": "Rome"}, {"city": "Rome"}),
        ("input", '{"city": "Rome", "unit": "c"}', {"city": "Rome", "unit": "c"}),
        ("parameters", {}, {}),
        ("arguments", {"town": "Rome"}, None),
        ("arguments", "Rome", None),
        ("arguments", '["city"]', None),
        ("where", {"city": "Rome"}, None),
    ],
)
def test_what_is_inside(key: str, value: Any, inside: Any) -> None:
    assert unwrapped(key, value, KNOWN) == inside


@given(st.sampled_from(sorted(WRAPPERS)), st.dictionaries(st.sampled_from(KNOWN), st.text()))
def test_a_parameter_of_the_tool_is_never_a_wrapper(key: str, value: dict[str, str]) -> None:
    assert unwrapped(key, value, (*KNOWN, key)) is None
    assert unwrapped(key, value, ()) is None
