"""A conversation as every family receives it, independent of the endpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

EXTRA_CONTENT = "extra_content"
"""The field of a call on the wire, as Google's API has it."""

Role = Literal["system", "developer", "user", "assistant", "tool"]

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


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str = ""
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    phase: Phase | None = None
    """Phase of an assistant's content, where it is known."""


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


def has_extra_content(conversation: Conversation) -> bool:
    return any(call.extra_content for each in conversation.messages for call in each.tool_calls)
