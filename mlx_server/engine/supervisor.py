"""Keeps an engine process running: starts another one when the present one is lost."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from mlx_server.engine.client import EngineClient
from mlx_server.engine.liveness import EngineActivity
from mlx_server.engine.messages import Ready
from mlx_server.errors import EngineDied, ServerError, public_message

log = logging.getLogger("mlx_server.engine")

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
"""Seconds before a restart; the pause doubles while engines are lost soon after their start."""

LIVED_SECONDS = 60.0
"""An engine that ran longer than this, or that has answered, resets the pause."""

REPLACED_SECONDS = 180.0
"""How long requests wait for an engine that replaces a lost one."""


class Supervisor:
    def __init__(
        self,
        spawn: Callable[[], EngineClient],
        on_lost: Callable[[], None] = lambda: None,
        on_started: Callable[[str, float], None] = lambda why, seconds: None,
    ) -> None:
        """spawn: makes a client that is not started. on_lost, on_started: called when an engine is
        lost, and when another one has started, with the reason and the seconds between."""
        self._spawn = spawn
        self._on_lost = on_lost
        self._on_started = on_started
        self._client: EngineClient | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._loss: tuple[str, float] | None = None
        """Why and when the engine was lost for which there is no other one yet."""
        self._started = asyncio.Event()
        """Set, and made anew, when an engine has started or none will."""
        self.restarts = 0
        self.ready: Ready | None = None
        """The facts that the engine reported at its latest start; None before."""

    @property
    def alive(self) -> bool:
        return self._client is not None and self._client.alive

    @property
    def pid(self) -> int | None:
        return self._client.pid if self._client else None

    @property
    def doing(self) -> EngineActivity | None:
        """The engine's current activity; None while there is no process."""
        return self._client.doing if self._client and self._client.pid else None

    @property
    def client(self) -> EngineClient:
        """The client of the running engine. Raises EngineDied while there is none."""
        if self._client is None or not self._client.alive:
            raise EngineDied("The engine is restarting. Try again in a moment.")
        return self._client

    async def running(self) -> EngineClient:
        """Returns the client of the running engine; if that was lost, waits for the next one.
        Raises EngineDied if none comes."""
        if self._keeping and not self.alive:
            with suppress(TimeoutError):
                async with asyncio.timeout(REPLACED_SECONDS):
                    while self._keeping and not self.alive:
                        await self._started.wait()
        return self.client

    def _tell_waiting(self) -> None:
        self._started.set()
        self._started = asyncio.Event()

    async def start(self) -> Ready:
        self._client = self._spawn()
        self.ready = ready = await self._client.start()
        self._keeping = asyncio.create_task(self._keep_running())
        return ready

    def keep_trying(self, error: ServerError | OSError) -> None:
        """Goes on with an engine that could not be started, as if it had been lost."""
        assert self._client is not None
        log.error("the engine could not be started: %s", public_message(error))
        self._client.lost.set()
        self._keeping = asyncio.create_task(self._keep_running())

    async def stop(self, error: ServerError | None = None) -> None:
        if keeping := self._keeping:
            self._keeping = None
            self._tell_waiting()
            keeping.cancel()
            await asyncio.wait({keeping})
        if self._client:
            await self._client.stop(error)

    def replace(self) -> None:
        """Has another engine started in place of the present one."""
        if self._client:
            self._client.end()

    def kill(self) -> None:
        if self._client:
            self._client.kill()

    async def _keep_running(self) -> None:
        clock = asyncio.get_running_loop().time
        pause = FIRST_PAUSE
        while True:
            assert self._client is not None
            began = clock()
            await self._client.lost.wait()
            self._loss = self._loss or (self._client.why_lost, clock())
            self._on_lost()
            await self._client.stop()
            has_lived = self._client.has_answered or clock() - began > LIVED_SECONDS
            pause = FIRST_PAUSE if has_lived else pause
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            await self._restart()

    async def _restart(self) -> None:
        self.restarts += 1
        self._client = self._spawn()
        try:
            self.ready = await self._client.start()
        except (ServerError, OSError) as error:
            log.error("the engine could not be restarted: %s", public_message(error))
            self._client.lost.set()
            return
        assert self._loss
        (why, lost_at), self._loss = self._loss, None
        self._on_started(why, asyncio.get_running_loop().time() - lost_at)
        self._tell_waiting()
