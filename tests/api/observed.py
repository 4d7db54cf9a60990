"""Events of an answer, as its client takes them."""

from collections.abc import AsyncGenerator

import pytest

from mlx_server.events import Event
from mlx_server.http.metrics import AnswerMetrics


async def played(
    log: AnswerMetrics, events: list[Event], take: int, prompts: tuple[str, ...] = ()
) -> None:
    async def source() -> AsyncGenerator[Event]:
        for event in events:
            yield event

    observed = log.observed(source(), "me", prompts)
    for _ in range(take):
        await anext(observed)
    if take == len(events):
        with pytest.raises(StopAsyncIteration):
            await anext(observed)
    await observed.aclose()
