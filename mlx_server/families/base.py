"""What differs by model family, and what most of them share.

Text is never control: whatever a client wrote, in a message, a tool's name or a schema, is marked
before the template sees it, and the prompt is cut wherever a control token is spelled across a
mark. So a control token can only come from the template's own text.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

from mlx_server.errors import BadRequest
from mlx_server.events import Event
from mlx_server.families.checkpoint import Checkpoint
from mlx_server.messages import Conversation, Message, Tool

DEEPEST = 64
"""Levels of objects and lists, as in a request's body."""

Close = Callable[[Any], Any]
"""Marks a client's text, or all of it in lists and objects; see Seal."""


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
    special_tokens: tuple[str, ...] = ()
    """Of the family's vocabularies, for models that are replayed without one."""
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
        taken = {name for name in asked if template.takes(name) and name not in checkpoint.tokens}
        variables: dict[str, Any] = {
            **checkpoint.tokens,
            **{name: seal.closed(asked[name]) for name in taken},
            "messages": [self.message(m, seal.closed) for m in conversation.messages],
            "tools": [tool_json(t, seal.closed) for t in conversation.tools] or None,
            "add_generation_prompt": True,
        }
        ignored = [f"chat_template_kwargs.{name}" for name in asked if name not in taken]
        if conversation.tools and "tools" not in template.reads:
            ignored.append("tools")
        return Rendered(seal.tokens(template.render(variables)), tuple(ignored))

    def message(self, message: Message, closed: Close) -> dict[str, Any]:
        """As Hugging Face's templates read it."""
        calls = [
            {
                "id": closed(call.id),
                "type": "function",
                "function": {
                    "name": closed(call.name),
                    "arguments": closed(_object(call.arguments)),
                },
            }
            for call in message.tool_calls
        ]
        optional = {
            "name": closed(message.name),
            "tool_calls": calls,
            "tool_call_id": closed(message.tool_call_id),
            "reasoning_content": closed(message.reasoning),
        }
        role = dict(self.roles).get(message.role, message.role)
        present = {key: value for key, value in optional.items() if value}
        return {"role": role, "content": closed(message.content), **present}


def tool_json(tool: Tool, closed: Close) -> dict[str, Any]:
    function = {
        "name": closed(tool.name),
        "description": closed(tool.description or ""),
        "parameters": closed(dict(tool.parameters)),
    }
    return {"type": "function", "function": function}


class Seal:
    """Marks what a client wrote, and cuts the prompt where a control token is spelled with it.

    A template may join, trim, replace or change the case of what it is given, so no text is known
    to be harmless before it ran. So a mark follows each character that could be the edge of a
    control token, wherever it stands. Marks that no control token spans leave no trace.
    """

    # Noncharacters: legal in a string, and never assigned to anything.
    CANDIDATES = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))

    def __init__(self, checkpoint: Checkpoint, conversation: Conversation) -> None:
        self._tokenizer = checkpoint.tokenizer
        self._mark = self._unused(repr(conversation).lower())
        # `tojson` with ensure_ascii and the repr of a list write the mark as an escape
        self._marks = re.compile(f"{self._mark}|{re.escape(_escape(self._mark))}")

    def _unused(self, text: str) -> str:
        # repr escapes noncharacters, so one that the client wrote shows as its escape, and so
        # does one that is escaped in the JSON of arguments
        free = (c for c in self.CANDIDATES if _escape(c) not in text)
        mark = next(free, None)
        if mark is None:
            raise BadRequest("The messages use every noncharacter from U+FDD0 to U+FDEF.")
        return mark

    def closed(self, value: Any, depth: int = DEEPEST) -> Any:
        if not depth:  # the arguments of an earlier call: JSON inside of JSON
            raise BadRequest(f"The messages nest deeper than {DEEPEST}.", param="messages")
        match value:
            case str():
                return self._closed(value)
            case list() | tuple():
                return [self.closed(item, depth - 1) for item in value]
            case dict():
                return {self._closed(key): self.closed(v, depth - 1) for key, v in value.items()}
        return value

    def _closed(self, text: str) -> str:
        places = sorted(self._tokenizer.risky(text))
        return self._mark.join(text[a:b] for a, b in pairwise([0, *places, len(text)]))

    def tokens(self, rendered: str) -> list[int]:
        pieces = self._marks.split(rendered)
        text = "".join(pieces)
        marked = set(accumulate(map(len, pieces[:-1])))
        spelled = (range(a + 1, b + 1) for a, b in self._tokenizer.spelled(text))
        behind = {place for places in spelled for place in places if place in marked}
        cuts = sorted(behind | {place - 1 for place in behind})
        return [
            token
            for a, b in pairwise([0, *cuts, len(text)])
            for token in self._tokenizer.encode_as_spelled(text[a:b])
        ]


def _escape(character: str) -> str:
    return repr(character)[1:-1]


def _object(arguments: str) -> Any:
    """Templates want the arguments of earlier calls as an object; what is none stays text."""
    try:
        found = json.loads(arguments)
        json.dumps(found, ensure_ascii=False).encode()  # an escape can hide half a character
    except (ValueError, RecursionError):
        return arguments
    return found
