"""The quick look at the shape of a schema takes nothing that the whole one refuses."""

from itertools import product
from typing import Any

from mlx_server import limits
from mlx_server.grammars.check import METASCHEMA, _is_plain, _validator

VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, "", "string", "text"),
    *([], ["a"], [1], ["a"] * (limits.SCHEMA_PROPERTIES + 1), [{}], ["string"]),
    *({}, {"a": {}}, {"a": True}, {"a": 1}, {"a": ["b"]}),
    dict.fromkeys(map(str, range(limits.SCHEMA_PROPERTIES + 1)), True),
]


def test_what_looks_plain_has_the_right_shape() -> None:
    plain = [pair for pair in product([*METASCHEMA, "title"], VALUES) if _is_plain(pair)]
    assert [pair for pair in plain if not _validator().is_valid(dict([pair]))] == []
    assert ("type", "string") in plain
    assert ("type", "text") not in plain
