"""How many bytes a server may send."""

import pytest

from mlx_server.mcp.errors import ConnectionLost
from mlx_server.mcp.streams import Meter


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
