"""Tools, and calls of them as upstreams send them."""

from typing import Any

from tests.upstream.playing import Json

WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME: Json = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}
PARIS = {"name": "get_weather", "arguments": {"city": "Paris"}}
PARIS_JSON = '{"city": "Paris"}'
CALL_JSON = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def call(arguments: Any, name: str = "get_weather", **more: Any) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": 0, "id": "call_1", "function": function, **more}]}


def indexed(index: Any, id: str | None = None, **function: Any) -> Json:
    """A piece of a call."""
    return {"tool_calls": [{"index": index, "id": id, "function": function}]}
