"""The oldest turns are left out where not all of them fit."""

import asyncio
from typing import Any

import pytest

from mlx_server.api.responses.create import answered_within_context, drop_oldest
from mlx_server.errors import ContextTooLong
from mlx_server.events import Event, Finished, Started
from mlx_server.messages import Conversation, Message
from mlx_server.requests import GenerateRequest


def turns(count: int) -> list[Message]:
    said = [[Message("user", str(i)), Message("assistant", str(i))] for i in range(count)]
    return [Message("system", "s"), *(message for turn in said for message in turn)]


@pytest.mark.parametrize(
    ("dropped", "left"), [(0, "0123"), (1, "123"), (3, "3"), (4, "3"), (100, "3")]
)
def test_the_oldest_turns_go_and_the_last_one_stays(dropped: int, left: str) -> None:
    found = drop_oldest(Conversation(tuple(turns(4))), dropped).messages
    assert found[0] == Message("system", "s")
    assert "".join(m.content for m in found if m.role == "user") == left
    assert drop_oldest(Conversation(found[:1]), dropped).messages == found[:1]


class Room:
    """Holds so many messages, and no more."""

    def __init__(self, size: int) -> None:
        self.size, self.tries = size, list[int]()

    async def respond(self, request: GenerateRequest) -> Any:
        (prompt,) = request.prompts
        assert isinstance(prompt, Conversation)
        self.tries.append(len(prompt.messages))
        if len(prompt.messages) > self.size:
            raise ContextTooLong("Too long.")
        yield Started("tiny", 1)
        yield Finished(0, "stop", 1, 0)


def answered(count: int, room: Room) -> list[Event]:
    async def everything() -> list[Event]:
        request = GenerateRequest("tiny", (Conversation(tuple(turns(count))),))
        return [
            event async for event in answered_within_context(request, room.respond, truncates=True)
        ]

    return asyncio.run(everything())


def test_as_much_as_fits_is_answered() -> None:
    room = Room(201)
    assert len(answered(100, room)) == 2
    assert room.tries == [201]
    room = Room(100)
    assert len(answered(100, room)) == 2
    assert room.tries == [201, 199, 197, 193, 185, 169, 137, 73]


def test_a_last_turn_that_is_too_long_is_an_error() -> None:
    room = Room(1)
    with pytest.raises(ContextTooLong):
        answered(3, room)
    assert room.tries == [7, 5, 3]
