"""Converts a responses body to a `GenerateRequest` and the use of MCP servers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_server.api import formats
from mlx_server.api.fields import check_stream_options
from mlx_server.api.responses.item_messages import messages_of
from mlx_server.api.responses.items import (
    AdditionalToolsItem,
    InputItem,
    ItemReference,
    McpListToolsItem,
    MessageItem,
    Open,
    ReasoningItem,
    ToolSearchOutputItem,
    read_items,
)
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.responses.tool_selection import select_tools
from mlx_server.api.responses.tool_table import NO_TABLE, ToolTable
from mlx_server.api.responses.tools import ToolParam
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation, Message
from mlx_server.requests import GenerateRequest, McpTools

Resolve = Callable[[str], Mapping[str, Any] | None]
"""Returns the wire form of the item with this id, None if it is not stored."""


@dataclass(frozen=True, slots=True)
class ParsedResponsesRequest:
    request: GenerateRequest
    mcp: McpTools
    ignored: tuple[str, ...]
    truncates: bool = False
    """Whether a prompt that is too long loses its oldest turns."""
    table: ToolTable = NO_TABLE
    """The tools that the names of calls stand for."""


def references(body: ResponsesBody) -> list[str]:
    """The ids of items that the client sends only as references."""
    given = body.input if isinstance(body.input, list) else []
    return [item.id for item in given if isinstance(item, ItemReference)]


def input_items(body: ResponsesBody, resolve: Resolve) -> list[InputItem]:
    """The items of this request, without references to items that are not stored."""
    if isinstance(body.input, str):
        return [MessageItem(type="message", role="user", content=body.input)]
    items: list[InputItem] = []
    for item in body.input or ():
        if not isinstance(item, ItemReference):
            items.append(item)
        elif (stored := resolve(item.id)) is not None:
            items += read_items([stored])
    return items


def to_request(
    body: ResponsesBody,
    items: Sequence[InputItem],
    earlier: Sequence[InputItem] = (),
    *,
    opened: Open,
) -> ParsedResponsesRequest:
    """`earlier`: the conversation's items before those of this request. `opened` reads the encoded
    content of reasoning."""
    check_stream_options(body.stream, body.stream_options)
    everything = [*earlier, *items]
    places = [*("previous_response_id" for _ in earlier), *_places(body, items)]
    found = [tool for item in everything for tool in _tools_of(item)]
    chosen = select_tools(body, listed=_listed(everything), found=found)
    turns = messages_of(zip(everything, places, strict=True), chosen.table, opened)
    if not turns.messages and not turns.approvals and body.instructions is None:
        raise BadRequest("`input` is missing: there is nothing to answer.", param="input")
    instructions = [Message("system", body.instructions)] if body.instructions else []
    constrained = body.constrained()
    conversation = Conversation(
        messages=(*instructions, *turns.messages),
        tools=chosen.tools,
        template_kwargs=body.template_kwargs(body.effort, "reasoning.effort"),
        response_format=formats.prompt_description(constrained["format"]),
    )
    request = GenerateRequest(
        model=body.model,
        **body.shared_fields(),
        include_raw=body.include_raw,
        **constrained,
        buffered=not body.stream,
        progress=body.include_progress,
        prompts=(conversation,),
        max_tokens=body.max_output_tokens,
        logprobs=body.logprobs,
        tool_choice=chosen.choice,
        thinking_budget=body.budget(),
        implied=body.implied_sampling(body.effort),
        param_names=body.param_names(body.effort, "reasoning.effort"),
        max_response_tokens=body.max_response_tokens,
        parallel_calls=body.parallel_tool_calls is not False,
        raw_messages=bool(body.enable_response_messages),
    )
    mcp = McpTools(chosen.servers, tuple(turns.approvals), chosen.mcp_choice, body.max_tool_calls)
    truncates = body.truncation == "auto"
    unread = turns.ignored | dict.fromkeys(_unread(body, items, opened))
    ignored = (*body.ignored(), *unread)
    return ParsedResponsesRequest(request, mcp, ignored, truncates, chosen.table)


def _tools_of(item: InputItem) -> Sequence[ToolParam]:
    """The tools that an item adds to those of the request."""
    match item:
        case ToolSearchOutputItem() | AdditionalToolsItem():
            return item.tools or ()
    return ()


def _unread(body: ResponsesBody, items: Sequence[InputItem], opened: Open) -> Iterator[str]:
    """The paths of items that are not stored here, and of sealed reasoning that another server has
    made."""
    if isinstance(body.input, list) and len(items) < len(body.input):
        yield "input.item_reference"
    for item in items:
        match item:
            case ReasoningItem(content=None | [] | "", encrypted_content=str(token)) if token:
                if opened(token) is None:
                    yield "input.encrypted_content"


def _places(body: ResponsesBody, items: Sequence[InputItem]) -> list[str]:
    is_text = isinstance(body.input, str)
    return ["input" if is_text else f"input[{i}]" for i in range(len(items))]


def _listed(items: Iterable[InputItem]) -> set[str]:
    """Labels of the MCP servers whose tools are already listed in the conversation."""
    lists = (item for item in items if isinstance(item, McpListToolsItem))
    return {item.server_label for item in lists if not item.error}
