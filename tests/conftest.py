"""Checkpoints that many tests share, made once. MLX is imported only where a test needs it.

And for the whole suite: a test that lets a connection leave this machine has failed, and examples
are the same in each run. Others: `--hypothesis-profile=other`.
"""

import gc
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from mlx_server.pool.sources import resolve
from tests.hostile.outbound import sitecustomize as outbound

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("other", max_examples=1000, deadline=None)
settings.load_profile("same")

gc.disable()  # until all tests are collected


def pytest_configure(config: pytest.Config) -> None:
    handle, os.environ[outbound.VARIABLE] = tempfile.mkstemp(prefix="outbound-")
    os.close(handle)
    everywhere = [str(Path(outbound.__file__).parent), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, everywhere))
    outbound.watch()
    # Where the suite runs in a shell's background, all that it starts would ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Thousands of tests stay to the end: no collection of garbage need look at them again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    os.unlink(os.environ.pop(outbound.VARIABLE))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Also of what its servers did since the test before it."""
    yield
    assert not outbound.attempts()


@pytest.fixture
def _may_connect() -> Iterator[None]:
    """For a test that asks for it."""
    with outbound.allowed():
        yield


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights; see tests/tiny.py."""
    from tests.tiny import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_model(tiny_path: Path) -> Any:
    """Its network, as the engine loads it."""
    from mlx_server.engine import weights

    loading = weights.load(tiny_path)
    while True:
        try:
            next(loading)
        except StopIteration as end:
            return end.value


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model, which is real; fetched once per machine."""
    with outbound.allowed():
        return resolve("demo:smollm2", lambda what, done, total: None)
