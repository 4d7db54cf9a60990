"""Lets the last events of a stopping server reach their clients before connections are cut."""

import asyncio

from uvicorn.server import ServerState

UNREAD_SECONDS = 0.25
"""How long a client may take to read its last event."""

WORKING_SECONDS = 2.0
"""How long answers may take to end, store what they have and write their last event."""

POLL_SECONDS = 0.02


async def let_last_words_out(state: ServerState) -> None:
    """Returns when all answers have ended and are sent, or their clients don't read them."""
    clock = asyncio.get_running_loop().time
    began = working = clock()
    while clock() - began < WORKING_SECONDS and clock() - working < UNREAD_SECONDS:
        unread = sum(map(_is_unread, state.connections))
        if len(state.tasks) > unread:
            working = clock()
        elif not unread:
            return
        await asyncio.sleep(POLL_SECONDS)


def _is_unread(connection: object) -> bool:
    """Whether the client has not yet read all that was sent to it."""
    transport = getattr(connection, "transport", None)
    return bool(transport and transport.get_write_buffer_size())
