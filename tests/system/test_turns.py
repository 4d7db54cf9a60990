"""Tasks that work for long take turns, with each other and with all others of their loop."""

import asyncio
from collections import Counter
from itertools import count, pairwise

import pytest

from mlx_server.system import turns
from mlx_server.system.turns import TURN_SECONDS, turn
from tests.event_loops import NewLoop, on_each_loop, run_on

STEP = 0.001
STEPS_PER_TURN = TURN_SECONDS / STEP
TASKS = 20


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """The steps of each task. The clock goes on by one step whenever it is read."""
    ticks = count()
    clock = type("Clock", (), {"perf_counter": staticmethod(lambda: next(ticks) * STEP)})
    monkeypatch.setattr(turns, "time", clock)
    return Counter()


async def work(number: int, steps: Counter[int]) -> None:
    while True:
        await turn()
        steps[number] += 1


@on_each_loop
def test_all_tasks_together_work_for_one_turn_in_each_iteration(
    new_loop: NewLoop, steps: Counter[int]
) -> None:
    async def look_on() -> None:
        tasks = [asyncio.create_task(work(number, steps)) for number in range(TASKS)]
        seen = []
        for _ in range(20 * TASKS):
            await asyncio.sleep(0)
            seen.append(steps.total())
        # one of them is cancelled while it waits for its turn, and the others go on
        tasks[3].cancel()
        before = Counter(steps)
        for _ in range(20 * TASKS):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        assert max(after - at for at, after in pairwise(seen)) <= STEPS_PER_TURN
        assert max(before.values()) - min(before.values()) <= 2 * STEPS_PER_TURN
        assert len(before) == TASKS
        assert all(steps[n] > before[n] for n in range(TASKS) if n != 3)
        assert steps[3] == before[3]

    run_on(new_loop, look_on(), 20)
