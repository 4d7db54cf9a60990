"""Placeholders are replaced once, wherever they stand, and by values of the right type."""

from typing import Any

import pytest

from mlx_server.clients.connect.template import CONTEXT, OUTPUT, Connection, filled

HERE = Connection("http://here", "secret", "m", 4099)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{url}/v1 {key} {model} {context}", "http://here/v1 secret m 4099"),
        ({"openai/{model}": [{"{key}": ("{url}",)}]}, {"openai/m": [{"secret": ["http://here"]}]}),
        ([CONTEXT, OUTPUT, f"{CONTEXT}!"], [4099, 1024, f"{CONTEXT}!"]),
        ([True, None, 0, 1.5], [True, None, 0, 1.5]),
        ("{other} {} {{model}}", "{other} {} {m}"),
    ],
)
def test_each_placeholder_has_its_value(template: Any, expected: Any) -> None:
    assert filled(template, HERE) == expected


@pytest.mark.parametrize("value", ["{model}", "{context}", "{url}{key}", r"\1\g<0>", CONTEXT])
def test_a_value_that_looks_like_a_placeholder_stays_as_it_is(value: str) -> None:
    connection = Connection(url=value, key=value, model=value, context=1)
    template = "{url} {key} {model}"
    assert filled(template, connection) == f"{value} {value} {value}"
    assert filled({"{model}": "{key}"}, connection) == {value: value}
