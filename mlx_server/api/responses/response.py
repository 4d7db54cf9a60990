"""A new response: the fields that repeat its request."""

import time
from typing import Any

from mlx_server.api.responses.items import Wire
from mlx_server.api.responses.protocol import JsonSchemaTextFormat, ResponsesBody, Text
from mlx_server.api.responses.tools import (
    FreeformTool,
    FunctionTool,
    McpTool,
    NamespacedTool,
    OtherTool,
    ToolNamespace,
    ToolParam,
    ToolSearchTool,
)

SOME_NAME = "answer"
"""The name of a schema for which the client sent none."""


def new_response(body: ResponsesBody, id: str, *, stored: bool) -> Wire:
    """A response with all fields that Open Responses requires, also unset ones. `text.verbosity`
    is left out if unset, since it may not be null."""
    choices = body.choices()
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": body.model,
        "previous_response_id": body.previous_response_id,
        **({"conversation": {"id": body.conversation_id}} if body.conversation_id else {}),
        "instructions": body.instructions,
        "output": [],
        "tools": [_tool_wire(tool) for tool in body.tools or () if not isinstance(tool, OtherTool)],
        "tool_choice": _choice_wire(body),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "max_tool_calls": body.max_tool_calls,
        "max_output_tokens": body.max_output_tokens,
        "reasoning": {
            "effort": body.effort,
            "summary": body.summary,
        },
        "text": _text_wire(body.text or Text()),
        "truncation": body.truncation or "disabled",
        "temperature": choices.get("temperature", 1.0),
        "top_p": choices.get("top_p", 1.0),
        "presence_penalty": choices.get("presence_penalty", 0.0),
        "frequency_penalty": choices.get("frequency_penalty", 0.0),
        "top_logprobs": body.top_logprobs or 0,
        "usage": None,
        "store": stored,
        "background": bool(body.background),
        "service_tier": "default",
        "metadata": body.metadata or {},
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        **({"user": body.user} if body.user else {}),
    }


def _choice_wire(body: ResponsesBody) -> Any:
    given = body.tool_choice
    if given is None or isinstance(given, str):
        return given or "auto"
    return given.model_dump(exclude_none=True)


def _tool_wire(tool: ToolParam | NamespacedTool) -> Wire:
    match tool:
        case FunctionTool():
            return _function_wire(tool)
        case ToolNamespace():
            nested = (each for each in tool.tools if not isinstance(each, OtherTool))
            return {
                "type": "namespace",
                "name": tool.name,
                "description": tool.description or "",
                "tools": [_tool_wire(each) for each in nested],
            }
        case FreeformTool() | ToolSearchTool():
            return tool.model_dump(exclude_none=True)
        case McpTool():  # headers and keys are left out: others may read the response
            return tool.model_dump(exclude_none=True, include=ECHOED_SERVER_FIELDS)
    return {}


def _function_wire(tool: FunctionTool) -> Wire:
    deferred = {} if tool.defer_loading is None else {"defer_loading": tool.defer_loading}
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
        **deferred,
    }


ECHOED_SERVER_FIELDS = {
    "type",
    "server_label",
    "server_url",
    "server_description",
    "connector_id",
    "allowed_tools",
    "require_approval",
}


def _text_wire(text: Text) -> Wire:
    verbosity = {"verbosity": text.verbosity} if text.verbosity else {}
    match text.format:
        case JsonSchemaTextFormat() as given:
            schema = {
                "type": "json_schema",
                "name": given.name or SOME_NAME,
                "description": given.description,
                "schema": given.schema_,
                "strict": bool(given.strict),
            }
            return {"format": schema, **verbosity}
        case None:
            return {"format": {"type": "text"}, **verbosity}
        case given:
            return {"format": {"type": given.type}, **verbosity}
