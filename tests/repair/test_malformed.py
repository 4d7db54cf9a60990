"""A call of an unknown tool stays text as other broken markup does, and its name is kept."""

import pytest

from mlx_server.repair.model_json import Malformed, UnknownTool


@pytest.mark.parametrize("name", ["launch", "", "a b", "it's", "\x1b[31m\n"])
def test_the_name_is_kept_and_quoted_on_one_line(name: str) -> None:
    with pytest.raises(Malformed) as raised:
        raise UnknownTool(name)
    assert isinstance(raised.value, UnknownTool)
    assert raised.value.name == name
    assert str(raised.value) == f"there is no tool {name!r}"
    assert str(raised.value).isprintable()
