"""A conversation as every family receives it, independent of the endpoint, and how much text it
has."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

UNNAMED = "unknown"
"""The name of a call that a client sends back without one."""

EXTRA_CONTENT = "extra_content"
"""The field of a call on the wire, as Google's API has it."""

Role = Literal["system", "developer", "user", "assistant", "tool"]
INSTRUCTION_ROLES = ("system", "developer")

Phase = Literal["commentary", "final_answer"]
"""`commentary` is text between tool calls, before the final answer."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON text, as the client or the model wrote it."""
    server: str | None = None
    """Label of the MCP server that has the tool; `name` is then the server's own name for it."""
    extra_content: Mapping[str, Any] | None = field(default=None, hash=False)
    """What an upstream sent with the call and needs back with its result, such as a signature."""


MediaKind = Literal["image", "audio", "video", "file"]

NOT_TEXT = "this model reads only text"


@dataclass(frozen=True, slots=True)
class Media:
    """A part of a message that is not text."""

    kind: MediaKind
    place: str
    """The path by which it is reported where a model is not shown it; empty for one that an MCP
    server returned, for which no request is refused."""
    about: str = ""
    """The type, and the size or the name, where they are known."""
    part: Mapping[str, Any] | None = field(default=None, hash=False)
    """The part as chat completions have it; None for one that no other server can read."""
    why: str = NOT_TEXT

    @property
    def line(self) -> str:
        """The text in its place for a model that is not shown it."""
        named = f"{self.kind}: {self.about}" if self.about else self.kind
        return f"[{named}, not shown: {self.why}]"


@dataclass(frozen=True, slots=True)
class PicturePart:
    """A picture that the model sees."""

    placeholder: str
    """What the model's chat templates write for a picture."""
    text: str = ""
    """What replaces the placeholder in the rendered prompt."""


ContentPart = str | Media | PicturePart

REPEATED = {"repeated": True}
"""Marks a field whose text is in another field too."""


def content_of(parts: Sequence[ContentPart]) -> str:
    """The content as text: a medium that the model is not shown is a line."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    pieces = (each if isinstance(each, str) else each.placeholder for each in pieces_of(parts))
    return "".join(pieces)


def pieces_of(parts: Iterable[ContentPart]) -> Iterator[str | PicturePart]:
    """The texts, each on a line of its own, and the pictures between them."""
    before: ContentPart = PicturePart("")
    for part in parts:
        if isinstance(part, PicturePart):
            yield part
        else:
            text = part if isinstance(part, str) else part.line
            yield text if isinstance(before, PicturePart) else f"\n{text}"
        before = part


def media_parts(parts: Sequence[ContentPart]) -> tuple[ContentPart, ...]:
    """The parts if there are media among them; none if the content is all that there is."""
    for part in parts:
        if isinstance(part, Media):
            return tuple(parts)
    return ()


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str = ""
    """All of it as text: each medium is a line."""
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    phase: Phase | None = None
    """Phase of an assistant's content, where it is known."""
    parts: tuple[ContentPart, ...] = field(default=(), metadata=REPEATED)
    """The content in its parts, if some of them are media."""

    @property
    def media(self) -> Iterator[Media]:
        return (part for part in self.parts if isinstance(part, Media))


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON Schema of the arguments object."""
    strict: bool = False
    unenforced: tuple[str, ...] = ()
    """The client's requirements on the arguments that the schema does not express."""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs` of the request; a family takes only what its template reads."""
    response_format: Mapping[str, Any] | None = None
    """The `json_schema` that the answer should follow: its `name`, `description` and `schema`. Or
    the `choice` of texts, or the `regex`, of which it should be one."""
    continue_final_message: bool = False
    """Whether the answer continues the last message, the assistant's, instead of following it."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the beginning of the answer; if not, it is only counted."""

    @property
    def continued(self) -> Message | None:
        """The message that the answer continues: its reasoning, if it has no content."""
        return self.messages[-1] if self.continue_final_message and self.messages else None

    def with_answer(self, answer: Message) -> "Conversation":
        """The conversation after an answer, of which `answer` is only what is new."""
        if (begun := self.continued) is None:
            return replace(self, messages=(*self.messages, answer))
        whole = replace(
            answer,
            content=begun.content + answer.content,
            reasoning=(begun.reasoning or "") + (answer.reasoning or "") or None,
            phase=answer.phase or begun.phase,
        )
        messages = (*self.messages[:-1], whole)
        return replace(self, messages=messages, continue_final_message=False)


def media_places(
    prompts: Iterable[object], takes: Callable[[Media], bool] = lambda _: False
) -> Iterator[str]:
    """The paths of the media that a model does not take, in those prompts that are
    conversations."""
    conversations = (prompt for prompt in prompts if isinstance(prompt, Conversation))
    messages = (message for conversation in conversations for message in conversation.messages)
    return (each.place for message in messages for each in message.media if not takes(each))


def has_extra_content(conversation: Conversation) -> bool:
    return any(call.extra_content for each in conversation.messages for call in each.tool_calls)


WINDOW = 1 << 16
"""Characters that are copied at a time."""


def texts_of(value: Any) -> Iterator[str]:
    """Yields every string in the value, including the keys of its mappings."""
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, _COLLECTIONS):
            pending += found
        elif names := _field_names(type(found)):
            pending += [getattr(found, name) for name in names]
        elif found is not None and isinstance(found, Mapping):
            pending += found.keys()
            pending += found.values()


_COLLECTIONS = (list, tuple, set, frozenset)


_field_names_of: dict[type, tuple[str, ...]] = {}


def _field_names(kind: type) -> tuple[str, ...]:
    """Returns the fields of a dataclass whose text no other one has; nothing for other types."""
    if kind not in _field_names_of:
        own = fields(kind) if is_dataclass(kind) else ()
        _field_names_of[kind] = tuple(each.name for each in own if each.metadata != REPEATED)
    return _field_names_of[kind]


def characters_of(value: Any) -> int:
    return sum(map(len, texts_of(value)))


def memory_of(value: Any) -> int:
    """Returns the bytes that the characters of all texts take in memory: one emoji makes each
    character of its text take four."""
    return sum(len(text) * _character_bytes(text) for text in texts_of(value))


def _character_bytes(text: str) -> int:
    """Returns the bytes of a character: 1, 2 or 4."""
    if text.isascii():
        return 1
    pieces = (text[begin : begin + WINDOW] for begin in range(0, len(text), WINDOW))
    return max(_bytes_of(piece) // len(piece) for piece in pieces)


def _bytes_of(piece: str) -> int:
    """Returns the bytes of a new string; other strings may keep their UTF-8, which counts in their
    size."""
    return sys.getsizeof(piece * 3) - sys.getsizeof(piece * 2)
