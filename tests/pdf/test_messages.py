"""Messages to and from the process that reads PDF files arrive as they were sent."""

from typing import Any, get_args

import msgspec
import pytest

from mlx_server.pdf import messages
from mlx_server.pdf.messages import ReadPdf, Reply
from tests.structs import broken, filled, tagged

REPLIES = get_args(Reply)
BOTH = [(ReadPdf, ReadPdf)] + [(each, Reply) for each in REPLIES]


def received(sent: object, union: Any) -> object:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=union)


def test_every_reply_can_be_decoded() -> None:
    assert tagged(messages) == set(REPLIES)


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


def test_the_request_is_no_reply() -> None:
    with pytest.raises(msgspec.ValidationError):
        received(filled(ReadPdf), Reply)
