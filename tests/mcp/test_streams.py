"""How many bytes and values a server may send."""

import pytest

from mlx_server.limits import MCP_MESSAGE_BRACKETS
from mlx_server.mcp.errors import ConnectionLost
from mlx_server.mcp.streams import Meter, ValueMeter


@pytest.mark.parametrize("sizes", [[10], [4, 6], [1] * 10, [0, 10, 0]])
def test_the_limit_itself_is_not_too_much_and_a_byte_more_is(sizes: list[int]) -> None:
    meter = Meter(10)
    for size in sizes:
        meter.count(size)
    for _ in range(2):  # it stays so
        with pytest.raises(ConnectionLost, match="sent more than 10 bytes"):
            meter.count(1)


def test_one_large_piece_is_too_much() -> None:
    with pytest.raises(ConnectionLost):
        Meter(10).count(11)


MANY = MCP_MESSAGE_BRACKETS.value


@pytest.mark.parametrize("unit", [b"[" * 4, b"{" * 4, b'"' * 16, b"," * 16])
def test_a_message_has_so_many_values(unit: bytes) -> None:
    meter = ValueMeter()
    for _ in range(MANY // 4):
        meter.count(unit)
    with pytest.raises(ConnectionLost, match="more than"):
        meter.count(unit)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_each_event_of_a_stream_is_a_message(end: bytes) -> None:
    event = b"data: " + b"[" * MANY
    stream, body = ValueMeter(is_stream=True), ValueMeter()
    for _ in range(3):
        stream.count(event + end)
    body.count(event + end)
    with pytest.raises(ConnectionLost):
        body.count(event)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_of_one_event_are_counted_together(end: bytes) -> None:
    line = b"data: " + b"[" * (MANY // 2) + end
    stream = ValueMeter(is_stream=True)
    stream.count(line * 2)
    with pytest.raises(ConnectionLost):
        stream.count(line)
