"""The beginning of a conversation's next prompt, once a prompt has its answer.

It is the history with the answer, as the template renders it before a next message. Templates drop
the reasoning of earlier turns and write calls in their own way, so it is not what the engine has
generated. The next message's text is unknown: two texts are rendered, and the known beginning is
what both prompts have in common.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from mlx_server.messages import Conversation, Message

UNKNOWN = ("x", "\ny")
"""Two messages that may follow. Some templates trim the text, and a line break at its beginning may
share a token with what precedes it."""

Tokens = Sequence[int]


def next_beginning(
    conversation: Conversation, answer: Message, render: Callable[[Conversation], Tokens]
) -> list[int]:
    """Returns the tokens. render: renders a whole prompt."""
    if not _returns_thoughts(conversation):
        answer = replace(answer, reasoning=None)
    answered = conversation.with_answer(answer)
    first, second = (
        render(replace(answered, messages=(*answered.messages, *following)))
        for following in _next_messages(answer)
    )
    pairs = zip(first, second, strict=False)
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _returns_thoughts(conversation: Conversation) -> bool:
    """Whether the client sends answers back with their reasoning, as far as its messages show."""
    return any(each.role == "assistant" and each.reasoning for each in conversation.messages)


def _next_messages(answer: Message) -> Iterator[Sequence[Message]]:
    """Yields the messages that may follow the answer."""
    for text in UNKNOWN:
        calls = answer.tool_calls
        results = [Message("tool", text, tool_call_id=call.id, name=call.name) for call in calls]
        yield results or [Message("user", text)]
