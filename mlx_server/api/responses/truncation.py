"""`truncation: auto`: a conversation that is too long for the model loses its oldest turns.

A turn is a user's message and all that follows it, up to the next one. Twice as many go each time,
so that a long conversation is not rendered over and over. What the system says first stays, and so
does the last turn.
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
    """The answer to as much of the conversation as fits."""
    (whole,) = request.prompts
    assert isinstance(whole, Conversation)
    left = whole
    for attempt in count():
        begun = False
        try:
            async with aclosing(respond(replace(request, prompts=(left,)))) as events:
                async for event in events:
                    begun = True
                    yield event
            return
        except ContextTooLong:
            shorter = await in_thread(drop_oldest, whole, 2**attempt)
            if begun or len(shorter.messages) == len(left.messages):
                raise
            left = shorter


def drop_oldest(conversation: Conversation, turns: int) -> Conversation:
    said = conversation.messages
    asked = [i for i, message in enumerate(said) if message.role == "user"]
    if not asked:
        return conversation
    last = asked[min(turns, len(asked) - 1)]
    before = next(
        i for i, message in enumerate(said) if message.role not in ("system", "developer")
    )
    return replace(conversation, messages=(*said[:before], *said[max(before, last) :]))
