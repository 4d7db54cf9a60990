"""Responses and the events of their streams against what two parties say of them: the classes of
the OpenAI SDK, and the schemas of Open Responses. And what a client makes of a stream.
"""

import json
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Union, get_args, get_origin

from jsonschema import Draft202012Validator
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tests.api.strict import assert_strict

Json = dict[str, Any]

OURS = {
    # that Open Responses requires, and OpenAI's server sends
    "store",
    "presence_penalty",
    "frequency_penalty",
    "bytes",
    "status",  # of a `custom_tool_call`: OpenAI's server sends it
    # that vLLM's server sends
    "tool_output_tokens",
    # that OpenAI's chat completions have
    *("accepted_prediction_tokens", "rejected_prediction_tokens"),
    # our own remarks
    "mlx_server",
}

NOT_OPEN = ("response.reasoning_text.", "response.mcp_", "error")
"""Where the two disagree: Open Responses has `response.reasoning.*`, no MCP, and `error` as an
object, at which the SDK would raise before the failed response comes."""

ENDS = ("response.completed", "response.incomplete", "response.failed")

ENDING = {"status", "output", "usage", "completed_at", "incomplete_details", "error", "mlx_server"}
"""What the end may tell otherwise than the beginning."""

SPEC = "urn:open-responses"


def _event_classes() -> dict[str, type[BaseModel]]:
    assert get_origin(ResponseStreamEvent) is Annotated
    union, *_ = get_args(ResponseStreamEvent)
    assert get_origin(union) is Union
    return {get_args(each.model_fields["type"].annotation)[0]: each for each in get_args(union)}


CLASSES = _event_classes()


@cache
def _spec() -> Json:
    """As the package llm-comply carries it."""
    text = (files("llm_comply") / "specs" / "openresponses.json").read_text("utf-8")
    found: Json = json.loads(text)
    assert '"nullable"' not in text, "OpenAPI 3.0's way to write null is not read here"
    return found


@cache
def _events() -> dict[str, str]:
    schemas = _spec()["components"]["schemas"]
    named = {name: schema for name, schema in schemas.items() if name.endswith("StreamingEvent")}
    return {schema["properties"]["type"]["enum"][0]: name for name, schema in named.items()}


@cache
def _validator(name: str) -> Draft202012Validator:
    resource = Resource.from_contents(_spec(), default_specification=DRAFT202012)
    registry: Registry[Any] = Registry().with_resource(SPEC, resource)
    return Draft202012Validator({"$ref": f"{SPEC}#/components/schemas/{name}"}, registry=registry)


def assert_open(name: str, body: Any) -> None:
    errors = [f"{error.json_path}: {error.message}" for error in _validator(name).iter_errors(body)]
    assert not errors, errors


def assert_response(body: Json, *, is_open: bool = True) -> None:
    assert_strict(Response, body, OURS)
    if is_open:
        assert_open("ResponseResource", body)


def assert_event(event: Json, *, is_open: bool = True) -> None:
    kind = event["type"]
    assert_strict(CLASSES[kind], event, OURS)
    if is_open and not kind.startswith(NOT_OPEN):
        assert_open(_events()[kind], event)


def assert_stream(events: Sequence[Json], *, is_open: bool = True) -> Json:
    """The response that it ends with, which is what its events say."""
    for event in events:
        assert_event(event, is_open=is_open)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created"
    assert [kind for kind in kinds if kind in ENDS] == kinds[-1:]
    response: Json = events[-1]["response"]
    assert folded(events) == response["output"]
    first = events[0]["response"]
    assert first["output"] == []
    assert _lasting(first) == _lasting(response)
    assert_response(response, is_open=is_open)
    return response


def _lasting(response: Json) -> Json:
    return {name: value for name, value in response.items() if name not in ENDING}


def folded(events: Sequence[Json]) -> list[Json]:
    """The items as a client puts them together from their pieces, checking each end against it."""
    items: dict[int, Json] = {}
    reported: dict[int, list[str]] = {}
    done: set[int] = set()
    for event in events:
        if "output_index" not in event:
            continue
        place, kind = event["output_index"], event["type"].removeprefix("response.")
        assert place not in done
        if kind == "output_item.added":
            assert place == len(items)
            items[place], reported[place] = deepcopy(event["item"]), []
            continue
        item = items[place]
        if not kind.endswith(".delta"):
            reported[place].append(kind)
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == "output_item.done":
            _check_item(item, event["item"])
            assert reported[place] == _life(event["item"])
            items[place] = deepcopy(event["item"])
            done.add(place)
        elif kind == "content_part.added":
            assert event["content_index"] == len(item["content"])
            item["content"].append(deepcopy(event["part"]))
        elif "content_index" in event:
            _add_to_part(item["content"][event["content_index"]], kind, event)
        elif kind.endswith("arguments.delta"):
            item["arguments"] += event["delta"]
        elif kind.endswith("arguments.done"):
            assert item["arguments"] == event["arguments"]
        elif kind.endswith("code.delta"):
            item["code"] += event["delta"]
        elif kind.endswith("code.done"):
            assert item["code"] == event["code"]
        elif kind.endswith("input.delta"):
            item["input"] += event["delta"]
        elif kind.endswith("input.done"):
            assert item["input"] == event["input"]
        elif kind == "reasoning_summary_part.added":
            assert event["summary_index"] == len(item["summary"])
            item["summary"].append(deepcopy(event["part"]))
        elif "summary_index" in event:
            _add_to_part(item["summary"][event["summary_index"]], kind, event)
    assert done == items.keys()
    return [items[place] for place in sorted(items)]


def _add_to_part(part: Json, kind: str, event: Json) -> None:
    if kind.endswith(".delta"):
        part["text"] += event["delta"]
        if "logprobs" in event:
            part["logprobs"] += event["logprobs"]
    elif kind.endswith("part.done"):
        assert part == event["part"]
    else:
        assert part["text"] == event["text"]
        assert part.get("logprobs") == event.get("logprobs")


def _check_item(made: Json, reported: Json) -> None:
    """What comes with the end alone is left out."""
    late = {"status", "encrypted_content", "output", "error", "tools"}
    if reported["type"] == "tool_search_call":
        late.add("arguments")
    assert {k: v for k, v in made.items() if k not in late} == {
        k: v for k, v in reported.items() if k not in late
    }
    if "status" in made:
        assert made["status"] == "in_progress"
        assert reported["status"] != "in_progress"


def _life(item: Json) -> list[str]:
    """The final events of such an item, without its beginning and pieces."""
    end = item.get("status")
    of_kind = {
        "message": ["content_part.added", "output_text.done", "content_part.done"],
        "reasoning": [
            "content_part.added",
            *(["reasoning_summary_part.added"] if item.get("summary") else []),
            *(["reasoning_summary_text.done"] if item.get("summary") else []),
            *(["reasoning_summary_part.done"] if item.get("summary") else []),
            "reasoning_text.done",
            "content_part.done",
        ],
        "function_call": ["function_call_arguments.done"],
        "custom_tool_call": ["custom_tool_call_input.done"],
        "tool_search_call": [],
        "mcp_call": [
            "mcp_call.in_progress",
            "mcp_call_arguments.done",
            *([f"mcp_call.{end}"] if end != "incomplete" else []),
        ],
        "mcp_list_tools": [
            "mcp_list_tools.in_progress",
            f"mcp_list_tools.{'completed' if item.get('tools') else 'failed'}",
        ],
        "mcp_approval_request": [],
    }
    return [*of_kind[item["type"]], "output_item.done"]


def timeless(response: Json) -> Json:
    """Without what differs from one answer to the same request to the next."""
    body = {k: v for k, v in response.items() if k not in ("id", "created_at", "completed_at")}
    body["output"] = [{k: v for k, v in item.items() if k != "id"} for item in body["output"]]
    return body
