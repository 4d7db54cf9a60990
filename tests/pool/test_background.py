"""Background work is forgotten when it ends, and stopped on request."""

import asyncio

from mlx_server.pool.scheduler import BackgroundWork


def test_work_is_counted_while_it_runs_and_stopped_to_its_end() -> None:
    ended: list[str] = []

    async def test() -> None:
        work, go_on = BackgroundWork(), asyncio.Event()

        async def quick() -> None:
            ended.append("quick")

        async def slow() -> None:
            try:
                await go_on.wait()
            finally:
                await asyncio.sleep(0)
                ended.append("slow")

        work.begin(quick())
        work.begin(slow())
        assert len(work) == 2
        await asyncio.sleep(0.01)
        assert len(work) == 1
        assert ended == ["quick"]
        await work.stop()
        assert ended == ["quick", "slow"]
        assert len(work) == 0

    asyncio.run(test())
