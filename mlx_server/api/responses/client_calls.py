"""The items of calls that the client runs, each as the client knows the tool."""

from mlx_server.api.accumulator import arguments_object
from mlx_server.api.freeform import FreeformInput
from mlx_server.api.responses.items import Wire
from mlx_server.api.responses.stream import End, Events, StreamedCall
from mlx_server.api.responses.tools import OfferedTool
from mlx_server.events import ToolCallStarted
from mlx_server.messages import EXTRA_CONTENT


class ClientCall(StreamedCall):
    def __init__(
        self, output_index: int, call: ToolCallStarted, called: OfferedTool | None
    ) -> None:
        super().__init__(output_index)
        self._call_id = call.id
        self._name = called.name if called else call.name
        self._namespace = called.namespace if called else None
        self._extra = call.extra_content

    def wire(self) -> Wire:
        namespace = {"namespace": self._namespace} if self._namespace else {}
        named = {"call_id": self._call_id, "name": self._name, **namespace}
        extra = {EXTRA_CONTENT: self._extra} if self._extra else {}
        return {**self._head(), **named, **self._final_fields(), **extra}


class StreamedFunctionCall(ClientCall):
    kind, arguments = "function_call", "function_call_arguments"


class StreamedCustomCall(ClientCall):
    """A call of a tool whose input is free text."""

    kind, arguments = "custom_tool_call", "custom_tool_call_input"

    def __init__(
        self, output_index: int, call: ToolCallStarted, called: OfferedTool | None
    ) -> None:
        super().__init__(output_index, call, called)
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


class StreamedToolSearch(ClientCall):
    """A search for tools, which the client runs. It has no events for its arguments."""

    kind = "tool_search_call"

    def wire(self) -> Wire:
        called = {"call_id": self._call_id, "execution": "client"}
        return {**self._head(), **called, "arguments": self._arguments()}

    def add(self, arguments: str) -> Events:
        self._pieces.append(arguments)
        yield from ()

    def finished_events(self) -> Events:
        yield from ()

    def _arguments(self) -> object:
        return arguments_object("".join(self._pieces)) if self.status == "completed" else {}


ITEMS: dict[str, type[ClientCall]] = {
    "function": StreamedFunctionCall,
    "custom": StreamedCustomCall,
    "tool_search": StreamedToolSearch,
}


def item_of(call: ToolCallStarted, called: OfferedTool | None, output_index: int) -> ClientCall:
    """The item for a call; `called` is the tool, None if the request did not list it."""
    return ITEMS[called.kind if called else "function"](output_index, call, called)
