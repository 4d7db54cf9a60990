"""Calls of tools that the model knows from its training, as the items that OpenAI has for them.

Nobody offered these tools, and nothing runs them: the items tell what the model wanted.
"""

from mlx_server.api.responses.items import Wire
from mlx_server.api.responses.stream import End, Events, OutputItem
from mlx_server.events import BuiltInCall
from mlx_server.repair.json_text import parsed

NO_CONTAINER = "auto"
"""OpenAI's word for one that is still to be made; the key may not be left out."""


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


def item_of(call: BuiltInCall, output_index: int, *, interprets: bool) -> OutputItem | None:
    """None: it is part of the reasoning. interprets: the client knows of a code interpreter."""
    if action := action_of(call):
        return StreamedWebSearchCall(output_index, action)
    if interprets and not call.tool.startswith("browser"):
        return StreamedCodeInterpreterCall(output_index, call.text)
    return None


def action_of(call: BuiltInCall) -> Wire | None:
    """None if it is none of the browser's, or makes no sense."""
    asked = _arguments(call)
    if asked is None:
        return None
    match call.tool:
        case "browser.search":
            return {"type": "search", **_texts(query=asked.get("query"))}
        case "browser.open":  # by its address, or by the number of a link
            return {"type": "open_page", **_texts(url=asked.get("id"))}
        case "browser.find":  # on a page that only the browser would know
            pattern = _texts(pattern=asked.get("pattern"))
            return {"type": "find_in_page", "pattern": "", "url": "", **pattern}
    return None


def _arguments(call: BuiltInCall) -> Wire | None:
    try:
        found = parsed(call.text or "{}")
    except ValueError:
        return None if call.is_whole else {}
    return found if isinstance(found, dict) else None


def _texts(**given: object) -> Wire:
    """Those that are; a model may escape half of a character."""
    return {
        name: value.encode(errors="replace").decode()
        for name, value in given.items()
        if isinstance(value, str)
    }
