"""Finds the lengths of a prompt at which the next requests are expected to differ from it.

Such requests are rendered: with another tool after the same ones, another system prompt, another
first question, another last question, a question in place of the answer, the conversation's next
turn, and the next result of a tool. What a template drops from earlier turns, or moves, shows in
their prompts.

The beginning of the next prompt is the history with the answer, as the template renders it before a
next message: templates drop the reasoning of earlier turns and write calls in their own way. The
next message is unknown, so two are rendered, and what both prompts have in common is the beginning.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

from mlx_server.errors import BadRequest
from mlx_server.messages import INSTRUCTION_ROLES, Conversation, Message, Tool, ToolCall
from mlx_server.prompts.control_token_guard import ControlTokenGuard, common_length

QUESTION = Message("user", "x")
ANSWERS = (Message("assistant", "x"), Message("assistant", "x", reasoning="x"))
"""Clients send back an answer's reasoning or leave it out."""

FURTHER_TOOL = Tool("x", "x")
"""Clients add tools that the model has found by searching, or those of a server that was connected
later."""


class RenderBranch(Protocol):
    def __call__(self, messages: Sequence[Message], *, further_tools: Sequence[Tool] = ()) -> str:
        """Renders messages in place of the conversation's, with further tools, as marked text."""


@dataclass(frozen=True)
class Branches:
    places: tuple[int, ...] = ()
    """Lengths of the prompt, as numbers of tokens in order."""
    continued_from: int = 0
    """The number of tokens that the conversation's next prompt is expected to begin with."""
    shared: int = 0
    """The number of tokens of its tools and system prompt, which other conversations share."""


def find_branches(
    conversation: Conversation,
    render: RenderBranch,
    text: str,
    tokens: Sequence[int],
    guard: ControlTokenGuard,
) -> Branches:
    """text: the prompt as marked text. tokens: the tokens of the prompt."""
    places = guard.token_places(text, tokens)

    def common_tokens(messages: Sequence[Message], further_tools: Sequence[Tool] = ()) -> int:
        try:
            other = render(messages, further_tools=further_tools)
            return places.before(common_length(text, other))
        except BadRequest:  # the template refuses this form of a conversation
            return 0

    nexts = [n for each in next_conversations(conversation) if (n := common_tokens(each))]
    others = [
        n for each in other_conversations(conversation.messages) if (n := common_tokens(each))
    ]
    begun = [*instructions(conversation.messages), QUESTION]
    shared = common_tokens(begun)
    tools = common_tokens(begun, [FURTHER_TOOL]) if conversation.tools else 0
    every = {*nexts, *others, shared, tools}
    return Branches(tuple(sorted(every - {0})), min(nexts, default=0), shared)


def instructions(messages: Sequence[Message]) -> Sequence[Message]:
    """Returns the system messages at the beginning of a conversation."""
    return list(takewhile(lambda message: message.role in INSTRUCTION_ROLES, messages))


def other_conversations(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yields conversations that begin with the same tools or messages and go on in another way."""
    first = len(instructions(messages))
    if first:  # most templates have the tools first, and agents end the system prompt with the date
        yield [Message(messages[0].role, "x"), QUESTION]
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=0)
    if last > first:
        yield [*messages[:last], QUESTION]
    yield [*messages, QUESTION]  # clients ask for a summary instead of an answer, or interrupt it


def next_conversations(conversation: Conversation) -> Iterator[Sequence[Message]]:
    for answer in ANSWERS:
        yield [*conversation.messages, answer, QUESTION]
    if conversation.tools:
        call = ToolCall("call_00000000", conversation.tools[0].name, "{}")
        result = Message("tool", "x", tool_call_id=call.id, name=call.name)
        yield [*conversation.messages, Message("assistant", tool_calls=(call,)), result]


UNKNOWN = ("x", "\ny")
"""Two messages that may follow. Some templates trim the text, and a line break at its beginning may
share a token with what precedes it."""

Tokens = Sequence[int]


def next_beginning(
    conversation: Conversation, answer: Message, render: Callable[[Conversation], Tokens]
) -> list[int]:
    """Returns the tokens. render: renders a whole prompt."""
    if not any(each.role == "assistant" and each.reasoning for each in conversation.messages):
        answer = replace(answer, reasoning=None)  # the client does not send it back
    answered = conversation.with_answer(answer)
    first, second = (
        render(replace(answered, messages=(*answered.messages, *following)))
        for following in _next_messages(answer)
    )
    return list(first[: common_length(first, second)])


def _next_messages(answer: Message) -> Iterator[Sequence[Message]]:
    """Yields the messages that may follow the answer."""
    for text in UNKNOWN:
        calls = answer.tool_calls
        results = [Message("tool", text, tool_call_id=call.id, name=call.name) for call in calls]
        yield results or [Message("user", text)]
