"""What differs by model family, and what most of them share.

Text is never control: whatever a client wrote, in a message, a tool's name or a schema, is marked
before the template sees it wherever it spells a control token, and the prompt is tokenised in
pieces cut at those marks. So a control token can only come from the template's own text.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_server.errors import BadRequest
from mlx_server.events import Event
from mlx_server.families.checkpoint import Checkpoint
from mlx_server.messages import Conversation, Message, Tool


class Parser(Protocol):
    """Output tokens to events, for one answer. The same tokens give the same events."""

    def feed(self, token: int, text: str) -> list[Event]:
        """text: what the token adds; empty for control tokens and unfinished characters."""

    def finish(self, text: str) -> list[Event]:
        """The answer is over; text: what the detokenizer still held."""


@dataclass(frozen=True)
class Rendered:
    tokens: list[int]
    ignored: tuple[str, ...] = ()
    """What the conversation set that this template has no place for, by parameter name."""


@dataclass(frozen=True)
class ModelFamily:
    name: str
    make_parser: Callable[[int], Parser]
    """From the answer's index in the events."""
    model_types: tuple[str, ...] = ()
    template_marks: tuple[str, ...] = ()
    """Texts that the chat template must contain, where the model type alone does not tell."""
    stop_tokens: tuple[str, ...] = ()
    """Beside those that the checkpoint names itself; by spelling, absent ones are passed over."""
    roles: tuple[tuple[str, str], ...] = (("developer", "system"),)
    """Roles that the templates of this family know by another name."""

    def recognises(self, checkpoint: Checkpoint) -> bool:
        source = checkpoint.template.source if checkpoint.template else ""
        return checkpoint.model_type in self.model_types and all(
            mark in source for mark in self.template_marks
        )

    def stops(self, checkpoint: Checkpoint) -> frozenset[int]:
        own = (checkpoint.tokenizer.id_of(token) for token in self.stop_tokens)
        return checkpoint.end_tokens | {token for token in own if token is not None}

    def render(self, checkpoint: Checkpoint, conversation: Conversation) -> Rendered:
        template = checkpoint.template
        if template is None:
            raise BadRequest(
                "This model has no chat template. Use /v1/completions, or set `chat_template:` "
                "for it in models.yaml.",
                param="messages",
            )
        seal = Seal(checkpoint, conversation)
        asked = conversation.template_kwargs
        variables: dict[str, Any] = {
            **checkpoint.tokens,
            **{name: seal.closed(value) for name, value in asked.items() if template.takes(name)},
            "messages": [seal.closed(self.message(m)) for m in conversation.messages],
            "tools": [seal.closed(tool_json(t)) for t in conversation.tools] or None,
            "add_generation_prompt": True,
        }
        ignored = [f"chat_template_kwargs.{name}" for name in asked if not template.takes(name)]
        if conversation.tools and "tools" not in template.reads:
            ignored.append("tools")
        return Rendered(seal.tokens(template.render(variables)), tuple(ignored))

    def message(self, message: Message) -> dict[str, Any]:
        """As Hugging Face's templates read it."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _object(call.arguments)},
            }
            for call in message.tool_calls
        ]
        optional = {
            "name": message.name,
            "tool_calls": calls,
            "tool_call_id": message.tool_call_id,
            "reasoning_content": message.reasoning,
        }
        role = dict(self.roles).get(message.role, message.role)
        present = {key: value for key, value in optional.items() if value}
        return {"role": role, "content": message.content, **present}


def tool_json(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}


class Seal:
    """Marks the places where a client's text spells a control token, and cuts there."""

    # Noncharacters: legal in a string, and never assigned to anything.
    CANDIDATES = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))

    def __init__(self, checkpoint: Checkpoint, conversation: Conversation) -> None:
        self._tokenizer = checkpoint.tokenizer
        self._mark = self._unused(repr(conversation))

    def _unused(self, text: str) -> str:
        # repr escapes noncharacters, so one that the client wrote shows as its escape
        free = (c for c in self.CANDIDATES if repr(c)[1:-1] not in text)
        mark = next(free, None)
        if mark is None:
            raise BadRequest("The messages use every noncharacter from U+FDD0 to U+FDEF.")
        return mark

    def closed(self, value: Any) -> Any:
        match value:
            case str():
                return self._closed(value)
            case list() | tuple():
                return [self.closed(item) for item in value]
            case dict():
                return {self.closed(key): self.closed(item) for key, item in value.items()}
        return value

    def _closed(self, text: str) -> str:
        control = self._tokenizer.control
        if control is None:
            return text
        places = [match.start() + 1 for match in control.finditer(text)]
        ends = [*places, len(text)]
        return self._mark.join(
            text[start:end] for start, end in zip([0, *places], ends, strict=True)
        )

    def tokens(self, text: str) -> list[int]:
        pieces = [piece for piece in text.split(self._mark) if piece]
        return [token for piece in pieces for token in self._tokenizer.encode(piece)]


def _object(arguments: str) -> Any:
    """Templates want the arguments of earlier calls as an object; what is none stays text."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
