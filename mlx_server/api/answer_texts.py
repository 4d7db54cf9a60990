"""What one request asked and what it was answered, as far as the page lists it."""

from mlx_server import limits
from mlx_server.events import Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted
from mlx_server.messages import Conversation
from mlx_server.requests import Prompt

LISTED = limits.LISTED_TEXT.value


class AnswerTexts:
    """The last message of the first prompt, and the first of its answers."""

    def __init__(self, prompt: Prompt) -> None:
        self._asked = _last_of(prompt)[:LISTED]
        self._parts = {"thoughts": "", "answer": "", "calls": ""}

    def take(self, event: Event) -> None:
        match event:
            case TextDelta(0):
                self._add("answer", event.separated)
            case ReasoningDelta(0):
                self._add("thoughts", event.separated)
            case ToolCallStarted(0):
                self._add("calls", f"\n{event.name} " if event.call else f"{event.name} ")
            case ToolCallDelta(0):
                self._add("calls", event.arguments)

    def shown(self) -> dict[str, str]:
        return {"asked": self._asked, **self._parts}

    def _add(self, part: str, text: str) -> None:
        if (room := LISTED - len(self._parts[part])) > 0:
            self._parts[part] += text[:room]


def _last_of(prompt: Prompt) -> str:
    match prompt:
        case Conversation(messages):
            return messages[-1].content if messages else ""
        case str():
            return prompt
        case _:
            return f"{len(prompt)} token ids"
