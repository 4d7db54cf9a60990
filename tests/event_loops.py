"""Runs tests on asyncio's event loop and on uvloop's, which the server uses and which differs."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

NewLoop = Callable[[], asyncio.AbstractEventLoop]

on_each_loop = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def run_on(new_loop: NewLoop, work: Coroutine[Any, Any, None], seconds: float) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(work, seconds))
