"""For `mlx-server doctor`: whether the engine starts on this machine and a model loads."""

import asyncio
import time
from collections.abc import Iterator

from mlx_server.cli.machine_checks import Check
from mlx_server.engine.client import EngineClient
from mlx_server.errors import ServerError, public_message
from mlx_server.sources.demo import made_checkpoint

REPORT = "please report it, with the whole output of `mlx-server doctor`"


def run_engine_check() -> Iterator[Check]:
    """Loads the demo model, if it has been made already: the doctor downloads nothing."""
    return iter(asyncio.run(_engine_checks()))


async def _engine_checks() -> list[Check]:
    engine, began = EngineClient(), time.perf_counter()
    try:
        await engine.start()
        checks = [Check("ok", "engine", f"starts in {time.perf_counter() - began:.1f} s")]
        return [*checks, await _demo(engine)]
    except (ServerError, OSError) as error:
        return [Check("fail", "engine", public_message(error), REPORT)]
    finally:
        await engine.stop()


async def _demo(engine: EngineClient) -> Check:
    if (folder := made_checkpoint()) is None:
        return Check("ok", "demo", "not made yet: the first `mlx-server serve` without models does")
    try:
        loaded = await engine.load("demo", str(folder), lambda done, total: None)
    except ServerError as error:
        return Check("fail", "demo", error.message, f"{REPORT}, or delete the model from the cache")
    return Check("ok", "demo", f"loads, {loaded.nbytes / 1e6:.0f} MB")
