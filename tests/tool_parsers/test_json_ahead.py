"""JSON values between delimiters that their strings may spell."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.messages import Tool
from mlx_server.tool_parsers import keyed_calls
from mlx_server.tool_parsers.call_format import CallFormat, parse_calls
from mlx_server.tool_parsers.source import complete_source
from mlx_server.tool_parsers.tag_formats import QWEN3_CODER, SEED_OSS
from mlx_server.tool_parsers.values import read_json

TOOL = Tool("keep", parameters={"type": "object", "properties": {"it": {"type": "object"}}})
ENDS = ("</parameter>", "</function>", "</tool_call>", "</seed:tool_call>", "\n", "'", "}", '"')
DELIMITERS = st.lists(
    st.sampled_from(
        (*ENDS, "</arg_value>", "<arg_key>", "<tool_call>", "<function=keep>", "a", "\\")
    ),
    max_size=6,
).map("".join)
VALUES = st.dictionaries(
    DELIMITERS, st.recursive(DELIMITERS, st.lists, max_leaves=4), min_size=1, max_size=3
)


def read(text: str) -> tuple[str, str]:
    """What is read, and what is left."""
    source = complete_source(text)
    with pytest.raises(StopIteration) as end:
        next(read_json(source))
    return end.value.value, source.ahead()


def test_only_whole_json_is_read() -> None:
    assert read('{"a": "</x>"}</x>') == ('{"a": "</x>"}', "</x>")
    assert read('[1, "]"], 2') == ('[1, "]"]', ", 2")
    assert read(" \n{} ") == (" \n{}", " ")
    for none in ("", "a", '"a"', "{", '{"a": 1', "{'a': 1}</x>", '{"a": "</x>"', "[1,]"):
        assert read(none) == ("", none)


def called(call_format: CallFormat, text: str) -> Any:
    ((call),) = parse_calls(call_format, text, [TOOL])
    return call["arguments"]


@pytest.mark.slow
@given(VALUES)
def test_strings_of_a_value_may_spell_every_delimiter(value: dict[str, Any]) -> None:
    written = json.dumps(value)
    tags = f"<function=keep>\n<parameter=it>\n{written}\n</parameter>\n</function>\n"
    assert called(QWEN3_CODER, f"{tags}</tool_call>") == {"it": value}
    assert called(SEED_OSS, f"{tags}</seed:tool_call>") == {"it": value}
    pairs = f"keep\n<arg_key>it</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    assert called(keyed_calls.GLM, pairs) == {"it": value}
