"""A watch over the event loop's callbacks."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.hostile.test_loop import Watch


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    watch = Watch()
    with pytest.MonkeyPatch.context() as patched:
        # uvloop's callbacks pass by no place where they could be measured
        patched.setattr(asyncio.Handle, "_run", watch.measured(asyncio.Handle._run))
        yield watch
