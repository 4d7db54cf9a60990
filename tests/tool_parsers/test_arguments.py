"""The arguments of a call become JSON, or are malformed."""

import json
from typing import Any

import pytest

from mlx_server.events import ToolCallDelta, ToolCallFinished
from mlx_server.repair.model_json import Malformed
from tests.tool_parsers.heard import Heard


def test_a_number_that_becomes_text_keeps_its_digits(heard: Heard) -> None:
    heard.calls.whole("write", '{"text": 3.10, "count": 2.0}')
    assert heard.arguments() == '{"text": "3.10", "count": 2}'


@pytest.mark.parametrize("value", ["\ud800", ["\udc00"], {"\udbffx": "é"}])
def test_half_of_a_surrogate_pair_stays_as_it_was_written(heard: Heard, value: Any) -> None:
    call = heard.calls.start("now")
    call.value("x", value)
    call.finish()
    assert heard.arguments().encode()
    assert json.loads(heard.arguments()) == {"x": value}


@pytest.mark.parametrize("value", [float("inf"), float("nan"), [float("-inf")]])
def test_what_json_can_not_say_is_malformed(heard: Heard, value: Any) -> None:
    with pytest.raises(Malformed):
        heard.calls.start("now").value("x", value)
    with pytest.raises(Malformed):
        heard.calls.start("now").finish_with({"x": value})
    assert not heard.of(ToolCallDelta)
    assert not heard.of(ToolCallFinished)


def test_what_is_too_deep_for_json_is_malformed(heard: Heard) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(Malformed):
        heard.calls.start("now").value("x", deep)
