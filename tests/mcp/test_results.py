"""A tool's result as text."""

import pytest

from tests.mcp.habits import opened, outcome

pytestmark = [pytest.mark.anyio, pytest.mark.hostile]


async def test_a_large_result_is_cut_with_a_notice() -> None:
    async with opened("floods a result") as toolset:
        result = await outcome(toolset, "floods a result")
    assert result == f"{'x' * (1 << 20)}\n[cut here; it has {3 << 20} bytes]"
