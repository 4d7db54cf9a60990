"""OpenAI's items for calls of tools that the model knows from its training.

The client did not offer these tools and nothing runs them; the items only report the calls.
"""

from mlx_server.api.responses.items import Wire
from mlx_server.api.responses.stream import End, Events, OutputItem
from mlx_server.api.responses.tools import HostedTools
from mlx_server.events import BuiltInCall
from mlx_server.repair.model_json import parsed

NO_CONTAINER = "auto"
"""OpenAI's value for a container that does not exist yet; `container_id` is required."""


class StreamedWebSearchCall(OutputItem):
    kind = "web_search_call"

    def __init__(self, output_index: int, action: Wire) -> None:
        super().__init__(output_index)
        self._action = action

    def wire(self) -> Wire:
        return {**self._head(), "action": self._action}

    def begin(self) -> Events:
        yield from super().begin()
        yield self._event("web_search_call.in_progress")


class StreamedCodeInterpreterCall(OutputItem):
    kind = "code_interpreter_call"

    def __init__(self, output_index: int, code: str) -> None:
        super().__init__(output_index)
        self._code = code

    def wire(self) -> Wire:
        code = "" if self.status == "in_progress" else self._code
        return {**self._head(), "code": code, "container_id": NO_CONTAINER, "outputs": None}

    def begin(self) -> Events:
        yield from super().begin()
        yield self._event("code_interpreter_call.in_progress")

    def end(self, status: End) -> Events:
        if self._code:
            yield self._event("code_interpreter_call_code.delta", delta=self._code)
        yield self._event("code_interpreter_call_code.done", code=self._code)
        yield from super().end(status)


def item_of(call: BuiltInCall, output_index: int, offered: HostedTools) -> OutputItem | None:
    """The item for a call; None if the call belongs into the reasoning, as that of a tool does
    that the client did not list."""
    if offered.searches and (action := action_of(call)):
        return StreamedWebSearchCall(output_index, action)
    if offered.interprets and not call.tool.startswith("browser"):
        return StreamedCodeInterpreterCall(output_index, call.text)
    return None


def action_of(call: BuiltInCall) -> Wire | None:
    """The action of a browser call; None for other tools and for invalid arguments."""
    arguments = _arguments(call)
    if arguments is None:
        return None
    match call.tool:
        case "browser.search":
            return {"type": "search", **_only_texts(query=arguments.get("query"))}
        case "browser.open":  # the id is a URL or the number of a link
            return {"type": "open_page", **_only_texts(url=arguments.get("id"))}
        case "browser.find":  # the URL of the page is not in the arguments
            pattern = _only_texts(pattern=arguments.get("pattern"))
            return {"type": "find_in_page", "pattern": "", "url": "", **pattern}
    return None


def _arguments(call: BuiltInCall) -> Wire | None:
    try:
        found = parsed(call.text or "{}")
    except ValueError:
        return None if call.is_whole else {}
    return found if isinstance(found, dict) else None


def _only_texts(**given: object) -> Wire:
    """The values that are text. Lone surrogates, which a model may write, are replaced."""
    return {
        name: value.encode(errors="replace").decode()
        for name, value in given.items()
        if isinstance(value, str)
    }
