"""The output items of a response while they are generated, and the events of their changes.

The events have no `sequence_number` yet: the response adds it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from mlx_server.api.accumulator import arguments_object, logprob_json
from mlx_server.api.freeform import FreeformInput
from mlx_server.api.responses.items import Seal, Wire, new_item_id
from mlx_server.api.responses.tools import OfferedTool
from mlx_server.events import (
    ApprovalRequested,
    McpCallFinished,
    McpCallStarted,
    TokenLogprob,
    ToolCallStarted,
    ToolsListed,
)
from mlx_server.messages import EXTRA_CONTENT, Phase

Events = Iterator[Wire]
End = Literal["completed", "incomplete"]


class OutputItem:
    kind = ""

    output_index: int
    """Set when the item is added to the response."""

    def __init__(self) -> None:
        self.id = new_item_id(self.kind)
        self.status = "in_progress"

    def wire(self) -> Wire:
        """The current state of the item."""
        raise NotImplementedError

    def begin(self) -> Events:
        yield self._whole("output_item.added")

    def end(self, status: End) -> Events:
        self.status = status
        yield self._whole("output_item.done")

    def _head(self) -> Wire:
        return {"id": self.id, "type": self.kind, "status": self.status}

    def _whole(self, what: str) -> Wire:
        return {"type": f"response.{what}", "output_index": self.output_index, "item": self.wire()}

    def _event(self, what: str, **more: object) -> Wire:
        place = {"item_id": self.id, "output_index": self.output_index}
        return {"type": f"response.{what}", **place, **more}


class TextItem(OutputItem):
    """An item with one part of content, which is streamed."""

    part = ""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[str] = []
        self._begun = False

    def begin(self) -> Events:
        yield from super().begin()
        self._begun = True
        yield self._event("content_part.added", content_index=0, part=self._part())

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Events:
        self._pieces.append(text)
        more = self._logprobs(logprobs)
        yield self._event(f"{self.part}.delta", content_index=0, delta=text, **more)

    def end(self, status: End) -> Events:
        part = self._part()
        final = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        yield self._event(f"{self.part}.done", content_index=0, **final)
        yield self._event("content_part.done", content_index=0, part=part)
        yield from super().end(status)

    def _content(self) -> list[Wire]:
        return [self._part()] if self._begun else []

    def _part(self) -> Wire:
        return {"type": self.part, "text": "".join(self._pieces)}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Wire:
        return {}


class StreamedReasoning(TextItem):
    kind, part = "reasoning", "reasoning_text"

    def __init__(self, seal: Seal | None) -> None:
        super().__init__()
        self._seal = seal

    def wire(self) -> Wire:
        more = {}
        if self._seal and self.status != "in_progress":
            more = {"encrypted_content": self._seal("".join(self._pieces))}
        return {**self._head(), "summary": self._summary(), "content": self._content(), **more}

    def _summary(self) -> list[Wire]:
        return []


class SummarizedReasoning(StreamedReasoning):
    """Reasoning that is also sent as its summary, which many clients show in its place. The model
    writes no other summary, so both are the same text."""

    def begin(self) -> Events:
        yield from super().begin()
        yield self._summary_event("part.added", part=_summary_part(""))

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Events:
        yield from super().add(text, logprobs)
        yield self._summary_event("text.delta", delta=text)

    def end(self, status: End) -> Events:
        text = "".join(self._pieces)
        yield self._summary_event("text.done", text=text)
        yield self._summary_event("part.done", part=_summary_part(text))
        yield from super().end(status)

    def _summary_event(self, what: str, **more: object) -> Wire:
        return self._event(f"reasoning_summary_{what}", summary_index=0, **more)

    def _summary(self) -> list[Wire]:
        return [_summary_part("".join(self._pieces))] if self._begun else []


class StreamedMessage(TextItem):
    kind, part = "message", "output_text"

    def __init__(self, phase: Phase | None = None) -> None:
        super().__init__()
        self.phase = phase
        self._tokens: list[msgspec.Raw] = []
        """JSON of each token's log probabilities, which four events have: encoding a million of
        them would keep all else waiting."""

    def wire(self) -> Wire:
        phase = {"phase": self.phase} if self.phase else {}
        return {**self._head(), "role": "assistant", **phase, "content": self._content()}

    def _part(self) -> Wire:
        return {**super()._part(), "annotations": [], "logprobs": list(self._tokens)}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Wire:
        added = list(map(logprob_json, logprobs))
        self._tokens += added
        return {"logprobs": added}


class StreamedCall(OutputItem):
    """An item with arguments, which are streamed."""

    arguments = ""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[str] = []
        self._whole_arguments = False

    def add(self, arguments: str) -> Events:
        self._pieces.append(arguments)
        yield self._event(f"{self.arguments}.delta", delta=arguments)

    def finished_events(self) -> Events:
        """The event that the arguments are complete, unless it has been sent."""
        if not self._whole_arguments:
            self._whole_arguments = True
            yield self._event(f"{self.arguments}.done", **self._final_fields())

    def end(self, status: End) -> Events:
        yield from self.finished_events()
        yield from super().end(status)

    def _final_fields(self) -> Wire:
        return {"arguments": "".join(self._pieces)}


class StreamedMcpCall(StreamedCall):
    kind, arguments = "mcp_call", "mcp_call_arguments"

    def __init__(self, call: McpCallStarted) -> None:
        super().__init__()
        self._call = call
        self._result: McpCallFinished | None = None

    def wire(self) -> Wire:
        result = self._result
        return {
            **self._head(),
            "server_label": self._call.server,
            "name": self._call.name,
            **self._final_fields(),
            "approval_request_id": self._call.approval,
            **_extra(self._call.extra_content),
            "output": result.output if result else None,
            "error": _error(result.error) if result and result.error is not None else None,
        }

    def begin(self) -> Events:
        yield from super().begin()
        yield self._event("mcp_call.in_progress")

    def run(self, result: McpCallFinished) -> Events:
        self._result = result
        yield from self.finished_events()
        failed = result.error is not None
        yield self._event("mcp_call.failed" if failed else "mcp_call.completed")
        self.status = "failed" if failed else "completed"
        yield self._whole("output_item.done")


class McpToolList(OutputItem):
    """The tools of an MCP server, which are all there when it begins. It has no status."""

    kind = "mcp_list_tools"

    def __init__(self, listed: ToolsListed) -> None:
        super().__init__()
        self._listed = listed

    def wire(self) -> Wire:
        listed = self._listed if self.status != "in_progress" else ToolsListed(0, "")
        tools = [
            {
                "name": tool.name,
                "description": tool.description,
                "input_schema": tool.schema,
                "annotations": tool.annotations,
            }
            for tool in listed.tools
        ]
        named = {"id": self.id, "type": self.kind, "server_label": self._listed.server}
        return {**named, "tools": tools, "error": listed.error}

    def begin(self) -> Events:
        yield from super().begin()
        yield self._event("mcp_list_tools.in_progress")

    def end(self, status: End) -> Events:
        failed = self._listed.error is not None and not self._listed.tools
        yield self._event("mcp_list_tools.failed" if failed else "mcp_list_tools.completed")
        yield from super().end(status)


class McpApproval(OutputItem):
    """A request for the user's approval of a call. It has no status either."""

    kind = "mcp_approval_request"

    def __init__(self, request: ApprovalRequested) -> None:
        super().__init__()
        self.id = request.id
        self._request = request

    def wire(self) -> Wire:
        return {
            "id": self.id,
            "type": self.kind,
            "server_label": self._request.server,
            "name": self._request.name,
            "arguments": self._request.arguments,
            **_extra(self._request.extra_content),
        }


def _extra(extra: Mapping[str, Any] | None) -> Wire:
    """An upstream's own fields of a call, which it needs back."""
    return {EXTRA_CONTENT: extra} if extra else {}


def _summary_part(text: str) -> Wire:
    return {"type": "summary_text", "text": text}


def _error(text: str) -> Wire:
    content = [{"type": "text", "text": text}]
    return {"type": "mcp_tool_execution_error", "content": content}


class StreamedFunctionCall(StreamedCall):
    kind, arguments = "function_call", "function_call_arguments"

    def __init__(self, call: ToolCallStarted, called: OfferedTool | None) -> None:
        """called: the tool, None if the request did not list it."""
        super().__init__()
        self._call, self._called = call, called

    def wire(self) -> Wire:
        called = self._called or self._call
        namespace = self._called.namespace if self._called else None
        named = {"call_id": self._call.id, "name": called.name}
        named |= {"namespace": namespace} if namespace else {}
        extra = _extra(self._call.extra_content)
        return {**self._head(), **named, **self._final_fields(), **extra}


class StreamedCustomCall(StreamedFunctionCall):
    """A call of a tool whose input is free text."""

    kind, arguments = "custom_tool_call", "custom_tool_call_input"

    def __init__(self, call: ToolCallStarted, called: OfferedTool | None) -> None:
        super().__init__(call, called)
        self._input = FreeformInput()

    def add(self, arguments: str) -> Events:
        yield from self._delta(self._input.feed(arguments))

    def end(self, status: End) -> Events:
        if status == "completed":
            yield from self._delta(self._input.finish())
        yield from super().end(status)

    def _delta(self, text: str) -> Events:
        if text:
            yield self._event(f"{self.arguments}.delta", delta=text)

    def _final_fields(self) -> Wire:
        return {"input": self._input.text}


class StreamedToolSearch(StreamedFunctionCall):
    """A search for tools, which the client runs. It has no events for its arguments."""

    kind = "tool_search_call"

    def wire(self) -> Wire:
        text = "".join(self._pieces) if self.status == "completed" else ""
        called = {"call_id": self._call.id, "execution": "client"}
        return {**self._head(), **called, "arguments": arguments_object(text)}

    def add(self, arguments: str) -> Events:
        self._pieces.append(arguments)
        yield from ()

    def finished_events(self) -> Events:
        yield from ()


CLIENT_CALLS: dict[str, type[StreamedFunctionCall]] = {
    "function": StreamedFunctionCall,
    "custom": StreamedCustomCall,
    "tool_search": StreamedToolSearch,
}
