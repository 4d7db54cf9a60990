"""Messages to and from the process that compiles schemas arrive as they were sent."""

from typing import Any, get_args

import msgspec
import pytest

from mlx_server.schemas import messages
from mlx_server.schemas.messages import Reply, Request
from tests.structs import broken, filled, tagged

REQUESTS, REPLIES = get_args(Request), get_args(Reply)
BOTH = [(each, Request) for each in REQUESTS] + [(each, Reply) for each in REPLIES]


def received(sent: object, union: Any) -> object:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=union)


def test_every_message_is_a_request_or_a_reply() -> None:
    assert tagged(messages) == {*REQUESTS, *REPLIES}
    assert not set(REQUESTS) & set(REPLIES)


@pytest.mark.parametrize(("message", "union"), BOTH)
def test_a_message_arrives_as_it_was_sent(message: Any, union: Any) -> None:
    sent = filled(message)
    arrived = received(sent, union)
    assert type(arrived) is message
    assert arrived == sent


@pytest.mark.parametrize(("message", "union"), BOTH)
def test_a_field_of_a_wrong_type_is_refused(message: Any, union: Any) -> None:
    for sent in broken(filled(message)):
        with pytest.raises(msgspec.ValidationError):
            received(sent, union)


@pytest.mark.parametrize("message", REQUESTS)
def test_a_request_is_no_reply(message: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        received(filled(message), Reply)
