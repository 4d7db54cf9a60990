"""A tool's result as text."""

import pytest

from tests.mcp.habits import opened, outcome

pytestmark = [pytest.mark.anyio, pytest.mark.hostile]


async def test_half_of_a_surrogate_pair_is_replaced() -> None:
    async with opened("cuts an emoji") as toolset:
        assert await outcome(toolset, "cuts an emoji") == "x\ufffd"


async def test_a_large_result_is_cut_with_a_notice() -> None:
    async with opened("floods a result") as toolset:
        result = await outcome(toolset, "floods a result")
    assert result == f"{'x' * (1 << 20)}\n[cut here; it has {3 << 20} bytes]"
