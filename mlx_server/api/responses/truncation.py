"""`truncation: auto`: a conversation that is too long for the model loses its oldest turns.

A turn is a user's message and all messages up to the next one. Each attempt drops twice as many, so
that a long conversation is not rendered many times. The first system messages and the last turn
always stay.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import count

from mlx_server.errors import ContextTooLong
from mlx_server.events import Event
from mlx_server.messages import Conversation
from mlx_server.request_threads import in_thread
from mlx_server.requests import GenerateRequest

Respond = Callable[[GenerateRequest], AsyncGenerator[Event]]


async def truncate_to_fit(request: GenerateRequest, respond: Respond) -> AsyncGenerator[Event]:
    """Answers the longest end of the conversation that fits, or raises ContextTooLong."""
    (whole,) = request.prompts
    assert isinstance(whole, Conversation)
    remaining = whole
    for attempt in count():
        begun = False
        try:
            async with aclosing(respond(replace(request, prompts=(remaining,)))) as events:
                async for event in events:
                    begun = True
                    yield event
            return
        except ContextTooLong:
            shorter = await in_thread(drop_oldest, whole, 2**attempt)
            if begun or len(shorter.messages) == len(remaining.messages):
                raise
            remaining = shorter


def drop_oldest(conversation: Conversation, turns: int) -> Conversation:
    messages = conversation.messages
    starts = [i for i, message in enumerate(messages) if message.role == "user"]
    if not starts:
        return conversation
    first_kept = starts[min(turns, len(starts) - 1)]
    system = next(
        i for i, message in enumerate(messages) if message.role not in ("system", "developer")
    )
    return replace(
        conversation, messages=(*messages[:system], *messages[max(system, first_kept) :])
    )
