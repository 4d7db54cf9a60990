"""JSON of a model is read without losing a digit or a key, or it is not read."""

import json
import math

import pytest

from mlx_server.repair.model_json import ExactFloat, loads_exactly


@pytest.mark.parametrize(
    "text", ["3.10", "-0.0", "1e5", "12345678901234567890.12", "0.30000000000000004000"]
)
def test_a_float_keeps_its_text(text: str) -> None:
    (number,) = loads_exactly(f"[{text}]")
    assert isinstance(number, ExactFloat)
    assert (number, number.text) == (float(text), text)
    assert json.dumps(number) == json.dumps(float(text)), "it is a float like any other"


def test_a_number_beyond_floats_is_infinite_and_keeps_its_text() -> None:
    number = loads_exactly("1e999")
    assert math.isinf(number)
    assert number.text == "1e999"


def test_integers_lose_nothing() -> None:
    assert loads_exactly(str(2**70)) == 2**70
    assert type(loads_exactly("5")) is int


@pytest.mark.parametrize(
    "text",
    ['{"a": 1, "a": 1}', '[{"b": {"": 1, "": 2}}]', '{"x": 1, "\\u0078": 2}', '{"a": {}, "a": {}}'],
)
def test_a_key_given_twice_is_an_error_at_any_depth(text: str) -> None:
    with pytest.raises(ValueError, match="twice"):
        loads_exactly(text)


def test_constants_are_floats_unless_they_are_converted() -> None:
    assert math.isnan(loads_exactly("NaN"))
    assert loads_exactly("[NaN, -Infinity]", str.lower) == ["nan", "-infinity"]
