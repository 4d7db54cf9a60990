"""Calls of replay models, held to the schemas of their tools, or the model's own."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.pairs import NAMED
from tests.live.common import Models, common_models, transcript
from tests.live.contract_requests import answered, body, refused
from tests.live.server import LiveServer

FREE, HELD = "calls-free", "calls-held"
"""Of one that calls: its calls are its own, or held to their schemas."""
CALLED = '<tool_call>\n{"name": "f", "arguments": {"a": [1, 1]}}\n</tool_call>'
UNABLE = "gemma3"

UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
NOT_UNIQUE = "tools.f: uniqueItems at #/properties/a"
UNREADABLE = {"type": "string", "pattern": "(a"}
IMPOSSIBLE = {"type": "integer", "allOf": [{"minimum": 2}, {"maximum": 1}]}
"""Only the compiler knows."""
TOO_LONG = {"type": "string", "minLength": 10**6}


@common_models
def models(folder: Path, _: object) -> Models:
    transcript(folder / "calls.jsonl", [{"output": CALLED, "off_grammar": "noise"}])
    own = {"source": "replay:calls.jsonl", "family": "qwen3"}
    unable = {**own, "family": UNABLE}
    return {FREE: own, HELD: {**own, "constrain_calls": True}, UNABLE: unable}


def tool(a: Any, name: str = "f", *, strict: bool = False) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"a": a},
        "required": ["a"],
        "additionalProperties": False,
    }
    function = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def remarks(server: LiveServer, asking: dict[str, Any]) -> tuple[Any, list[str]]:
    """The arguments of its calls, and what was not enforced."""
    with server.http() as http:
        found = http.post("/v1/chat/completions", json=asking).json()
    calls = found["choices"][0]["message"].get("tool_calls", ())
    arguments = [json.loads(call["function"]["arguments"]) for call in calls]
    return arguments, found.get("mlx_server", {}).get("unenforced", [])


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("bad", [UNREADABLE, IMPOSSIBLE, TOO_LONG, {"not": {}}])
@pytest.mark.parametrize("model", [FREE, HELD])
def test_a_strict_tool_is_kept_to_or_refused(
    server: LiveServer, model: str, bad: Any, choice: str
) -> None:
    asking = body(model, tools=[tool({}, "g"), tool(bad, strict=True)], tool_choice=choice)
    found = refused(server, asking)
    assert (found.status, found.error["code"]) == (400, "invalid_json_schema")
    assert found.error["param"].startswith("tools")


@pytest.mark.parametrize(
    ("bad", "lost"),
    [(IMPOSSIBLE, "parameters"), (TOO_LONG | {"type": "array"}, "minLength at #/properties/a")],
)
def test_what_can_not_be_held_of_a_tool_is_told(server: LiveServer, bad: Any, lost: str) -> None:
    asking = body(HELD, tools=[tool(bad), tool(UNIQUE, "g")])
    reported = [f"tools.f: {lost}", "tools.g: uniqueItems at #/properties/a"]
    assert remarks(server, asking) == ([{"a": [1, 1]}], reported)


@pytest.mark.parametrize(
    ("tools", "choice", "reported"),
    [
        ([tool(UNIQUE)], "auto", [NOT_UNIQUE]),
        ([tool(UNIQUE)], "required", [NOT_UNIQUE]),
        ([tool(UNIQUE), tool({}, "g")], "required", [NOT_UNIQUE]),
        ([tool({}), tool(UNIQUE, "g")], NAMED, []),
        ([tool(UNIQUE)], "none", []),
        ([tool({"type": "array"}, strict=True)], "auto", []),
    ],
)
def test_what_a_grammar_leaves_out_of_a_tool_is_told(
    server: LiveServer, tools: list[Any], choice: Any, reported: list[str]
) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    asking = body(HELD, tools=tools, tool_choice=named if choice == NAMED else choice)
    calls, unenforced = remarks(server, asking)
    assert calls == ([] if choice == "none" else [{"a": [1, 1]}])
    assert unenforced == reported


def test_of_calls_that_nobody_wants_held_nothing_is_told(server: LiveServer) -> None:
    asking = body(FREE, tools=[tool(UNIQUE)])
    assert remarks(server, asking) == ([{"a": [1, 1]}], [])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_family_that_can_not_call_says_so(server: LiveServer, choice: Any) -> None:
    found = refused(server, body(UNABLE, tools=[tool({})], tool_choice=choice))
    assert (found.status, found.error["param"]) == (400, "tool_choice")
    assert UNABLE in found.error["message"]
    answer, _ = answered(server, body(UNABLE, tools=[tool({})], tool_choice="none"))
    assert (answer.text, answer.calls) == (CALLED, [])
    # a call in the delimiters of another family is made, where calls are wanted
    answer, _ = answered(server, body(UNABLE, tools=[tool({})], tool_choice="auto"))
    assert (answer.text, answer.calls) == ("", [["f", '{"a": [1, 1]}']])
