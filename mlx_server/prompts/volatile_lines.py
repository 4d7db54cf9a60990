"""Removes lines that a client changes with every request and that mean nothing to the model.

They stand at the beginning of a prompt, so that nothing after them would be found in the prompt
cache. They are removed from the system prompt of requests to any endpoint: proxies translate the
requests of one API for another one.

A line belongs in the table if it is known to change and to mean nothing. Dates, working folders,
ids of messages and sessions that a tool or an answer may need, and `<total_tokens>` mean something
and stay, however often they change.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mlx_server.messages import Conversation, Message

INSTRUCTION_ROLES = ("system", "developer")


END = r"[ \t]*(?:\r?\n|\Z)"


@dataclass(frozen=True)
class VolatileLine:
    name: str
    client: str
    """The client that sends the line."""
    why: str
    line: re.Pattern[str]
    """Matches the whole line with its end."""


VOLATILE_LINES = (
    VolatileLine(
        "x-anthropic-billing-header",
        "Claude Code and programs on Anthropic's agent SDK",
        "For Anthropic's billing: version, entry point, a checksum (`cch`) and the id of the "
        "previous request (`cc_prev_req`). Most often the first line.",
        re.compile(
            rf"^x-anthropic-billing-header:(?>[ \t]*\w+=[^;\s]*(?:;|(?={END})))++{END}", re.M
        ),
    ),
)


def without_volatile_lines(conversation: Conversation) -> tuple[Conversation, tuple[str, ...]]:
    """Returns the conversation without these lines, and the lines' names. Only the system prompt is
    searched: the messages before the first one of another role."""
    messages, found = conversation.messages, dict[str, None]()
    first = next((i for i, m in enumerate(messages) if m.role not in INSTRUCTION_ROLES), None)
    kept = tuple(_cleaned(messages[:first], found))
    if not found:
        return conversation, ()
    rest = () if first is None else messages[first:]
    return replace(conversation, messages=(*kept, *rest)), tuple(found)


def _cleaned(messages: Sequence[Message], found: dict[str, None]) -> Iterator[Message]:
    """Yields the messages without the lines, except those that are then empty. Adds names to
    `found`."""
    for message in messages:
        text = message.content
        for volatile in VOLATILE_LINES:
            if volatile.name in text:
                text, count = volatile.line.subn("", text)
                found |= dict.fromkeys([volatile.name] * count)
        if text == message.content:
            yield message
        elif text:
            yield replace(message, content=text)
