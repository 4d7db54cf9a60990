"""Our parsers of call formats and mlx-lm's, where it has one: where they differ, and why.

Each input is the text between a call's delimiters. Without a reason both have to read the same, and
with one they have to differ: what a new mlx-lm changes shows here.
"""

import importlib
import json
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx_lm.tool_parsers
import pytest
import yaml

from mlx_server.tool_parsers import formats, tag_formats
from mlx_server.tool_parsers.call_format import CallFormat, parse_calls
from mlx_server.tool_parsers.elements import KIMI_K3
from mlx_server.tool_parsers.keyed_calls import GLM
from tests.families.goldens import FOLDER, tools

OURS: dict[str, CallFormat] = {
    "function_gemma": formats.FUNCTION_GEMMA,
    "gemma4": formats.GEMMA4,
    "glm47": GLM,
    "json_tools": formats.HERMES,
    "kimi_k2": formats.KIMI_K2,
    "kimi_k3": KIMI_K3,
    "minimax_m2": tag_formats.MINIMAX_M2,
    "mistral": formats.MISTRAL,
    "pythonic": formats.LFM2,
    "qwen3_coder": tag_formats.QWEN3_CODER,
}

NOT_OURS = {
    "laguna": "glm47 by another name",
    "longcat": "no family of ours writes it",
    "minicpm5": "no family of ours writes it",
    "muse_spark": "no family of ours writes it",
}

UNKNOWN = "a call of a tool that was not offered is text to us"
TYPED = "ours gives the schema's type to what can only be meant so"
CUT = "a call that is cut off is none to us"
SPACE = "ours keeps the white space of a text"
SLIP = "ours repairs a comma too many"


def k2(id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def k3(tool: str, *arguments: tuple[str, str, str]) -> str:
    written = "".join(
        f'<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, type, value in arguments
    )
    return f'<|open|>call tool="{tool}" index="1"<|sep|>{written}<|close|>call<|sep|>'


def glm_call(name: str, **arguments: str) -> str:
    pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"{name}\n{''.join(pairs)}"


def minimax(name: str, **arguments: str) -> str:
    pairs = (f'<parameter name="{key}">{v}</parameter>\n' for key, v in arguments.items())
    return f'\n<invoke name="{name}">\n{"".join(pairs)}</invoke>\n'


def qwen(name: str, **arguments: str) -> str:
    pairs = (f"<parameter={key}>\n{v}\n</parameter>\n" for key, v in arguments.items())
    return f"\n<function={name}>\n{''.join(pairs)}</function>\n"


INPUTS: dict[str, dict[str, str]] = {
    "json_tools": {
        '\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n': "",
        '[{"name": "get_time", "arguments": {}}]': "",
        '{"name": "add", "arguments": {"a": 1': "",
        '{"name": "add", "arguments": {"a": "1", "b": 2}}': TYPED,
        '{"name": "add", "arguments": {"a": 1, "b": 2,}}': SLIP,
        '{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}': TYPED,
        '{"name": "add", "parameters": {"a": 1, "b": 2}}': "the same by another key",
        '{"name": "get_time", "arguments": {}}\n{"name": "get_time", "arguments": {}}': "two calls "
        "in one block",
        '```json\n{"name": "get_time", "arguments": {}}\n```': "a code fence changes nothing",
        '{"name": "fly", "arguments": {}}': UNKNOWN,
    },
    "kimi_k2": {
        k2("functions.add:0", '{"a": 1, "b": 2}'): "",
        k2("functions.add:0", '{"a": 1, "b": 2}') + k2("functions.get_time:1", "{}"): "",
        k2("functions.add:0", '{"a": 1, "b": 2,}'): "",
        k2("functions.add:0", '{"a": "1", "b": 2}'): TYPED,
        k2("functions.get_time", "{}"): "an id without its number names the tool as well",
        k2("functions.get_time:0", ""): "no arguments are an empty object, not a text",
        k2(
            "functions.write_file:0", '{"path": "a", "content": "<|tool_call_end|>"}'
        ): "a delimiter inside of a string is text",
        k2("functions.fly:0", "{}"): UNKNOWN,
        k2("functions.add:0", '{"a": 1').removesuffix("<|tool_call_end|>"): CUT,
    },
    "kimi_k3": {
        k3("set_alarm", ("hour", "number", "7"), ("label", "null", "null")): "",
        k3("write_file", ("path", "string", "a"), ("content", "string", ' "x" &amp; ')): "",
        k3("search", ("q&amp;a &quot;x&quot;", "string", "")): "",
        k3("get_time") + k3("get_time"): "",
        k3("set_alarm", ("hour", "number", "seven")): "",
        k3("get_time").removesuffix("<|close|>call<|sep|>"): "",
        k3("set_alarm", ("hour", "string", "7")): TYPED,
        k3("fly"): UNKNOWN,
    },
    "gemma4": {
        'call:get_weather{city:<|"|>Paris<|"|>}': "",
        "call:get_time{}": "",
        "call:set_alarm{hour:7,label:null,repeat:true,volume:0.5}": "",
        'call:write_file{path:<|"|>a<|"|>,content:<|"|>b","c:1}<|"|>}': "",
        'call:get_weather{city:<|"|>Par': "",
        'call:set_alarm{hour:<|"|>7<|"|>}': TYPED,
        'call:search{filters:{open now:true},query:<|"|>a<|"|>}': "a key may have spaces",
        'call:search{filters:{x:None},query:<|"|>a<|"|>}': "the template writes None for null",
        "call:get_weather{city:Paris}": "a bare word can only be a text",
        "call:fly{}": UNKNOWN,
    },
    "function_gemma": {
        "call:get_weather{city:<escape>Paris<escape>,unit:<escape>c<escape>}": "",
        "call:get_time{}": "",
        "call:set_alarm{hour:7,repeat:true}": "",
        "call:get_weather{city:<escape>Par": "",
        "call:set_alarm{hour:<escape>7<escape>}": TYPED,
        "call:search{filters:{a:1},query:<escape>x<escape>}": "mlx-lm has no objects in objects",
        "call:tag{names:[<escape>a<escape>,<escape>b<escape>]}": "mlx-lm has no lists of texts",
        "call:write_file{path:<escape>a<escape>,content:<escape>{x}<escape>}": "a brace inside "
        "of a string is text",
        "call:fly{}": UNKNOWN,
    },
    "glm47": {
        glm_call("set_alarm", hour="7", label="null", repeat="true"): "",
        glm_call("get_time"): "",
        "get_time": "",
        glm_call("get_weather", city="42"): "",
        glm_call("tag", names='["a"]'): "",
        glm_call("get_weather", city=" Paris "): SPACE,
        glm_call("tag", names="['a']"): "",
        glm_call("fly", hour="7"): UNKNOWN,
        "set_alarm\n<arg_key>hour</arg_key>\n<arg_value>7": CUT,
        '{"name": "get_time", "arguments": {}}': "",
    },
    "minimax_m2": {
        minimax("set_alarm", hour="7", repeat="true", label="null"): "",
        minimax("get_time"): "",
        minimax("get_time") * 2: "",
        minimax("set_alarm", hour="7").partition("</")[0]: "",
        minimax("get_weather", city="null"): "a text may be the word null",
        minimax("get_weather", city=" Paris "): SPACE,
        minimax("set_alarm", repeat="yes"): "yes is not certain to be true",
        minimax("fly"): UNKNOWN,
    },
    "mistral": {
        '[{"name": "add", "arguments": {"a": 1, "b": 2}}]': "",
        'add[ARGS]{"a": 1, "b": 2}': "",
        'add[ARGS]{"a": 1, "b": 2}get_time[ARGS]{}': "each call of this form has its own delimiter",
        '[{"name": "get_time", "arguments": {}}, {"name": "get_time", "arguments": {}}]': "",
        'add[ARGS]{"a": 1': "",
        '[{"name": "add", "arguments": {"a": "1", "b": 2}}]': TYPED,
        'add[CALL_ID]abcdefghi[ARGS]{"a": 1, "b": 2}': "mlx-lm takes the id for the name",
        'add{"a": 1, "b": 2}': "the delimiter before the arguments may be missing",
        'add[ARGS]{"a": 1, "b": 2,}': SLIP,
        '[{"name": "fly", "arguments": {}}]': UNKNOWN,
    },
    "pythonic": {
        "[add(a=1, b=2)]": "",
        '[get_time(), get_weather(city="Paris")]': "",
        "[set_alarm(hour=7, label=None, repeat=True, minute=0)]": "",
        "[set_alarm(hour=7, label=null, repeat=true, minute=0)]": "",
        "[tag(names=[\"a\", 'b'])]": "",
        "[write_file(path='a', content='it\\'s\\n')]": "",
        "[add(a=1, b=": "",
        '[set_alarm(hour="7")]': TYPED,
        "get_time()": "a single call needs no list",
        '[{"name": "get_time", "arguments": {}}]': "LFM2 writes JSON too when it is asked to",
        "[add(1, 2)]": "arguments without names are not dropped: it is no call",
        "[fly()]": UNKNOWN,
    },
    "qwen3_coder": {
        qwen("set_alarm", hour="7", repeat="true", label="null"): "",
        qwen("get_time"): "",
        qwen("get_weather", city=" Paris "): "",
        qwen("get_weather", city="42"): "",
        qwen("set_alarm", hour="7").partition("</")[0]: "",
        qwen("set_alarm", hour="seven"): "what is no number goes on as it is: the tool may say so",
        qwen("set_alarm", repeat="yes"): "yes is not certain to be false",
        qwen("search", filters="{'a': True}", query="x"): "",
        qwen("get_time") * 2: "two calls in one block",
        qwen("fly"): UNKNOWN,
    },
}


def table() -> list[Any]:
    return [
        pytest.param(parser, text, reason, id=f"{parser}-{number}")
        for parser, inputs in INPUTS.items()
        for number, (text, reason) in enumerate(inputs.items())
    ]


def calls_of(parse: Callable[..., Any], text: str, offered: Any) -> str | None:
    """Names and arguments of the calls as JSON, where 1 and 1.0 differ; None where it refuses."""
    try:
        found = parse(text, offered)
    except Exception:  # mlx-lm's raise whatever comes
        return None
    calls = found if isinstance(found, list) else [found]
    return json.dumps([[call["name"], call.get("arguments")] for call in calls], sort_keys=True)


@pytest.mark.slow
@pytest.mark.parametrize(("parser", "text", "reason"), table())
def test_every_difference_has_a_reason(parser: str, text: str, reason: str) -> None:
    theirs = importlib.import_module(f"mlx_lm.tool_parsers.{parser}").parse_tool_call
    offered = yaml.safe_load((FOLDER / "tools.yaml").read_text("utf-8"))
    our_calls = calls_of(partial(parse_calls, OURS[parser]), text, tools())
    their_calls = calls_of(theirs, text, offered)
    assert (our_calls != their_calls) == bool(reason), f"{our_calls} | {their_calls}: {reason}"


def test_every_parser_of_mlx_lm_is_compared_or_not_for_a_reason() -> None:
    shipped = {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    assert shipped == OURS.keys() | NOT_OURS.keys()
    assert OURS.keys() == INPUTS.keys()
