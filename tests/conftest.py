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

from mlx_server.sources.cache import cache_dir
from mlx_server.sources.source import resolve
from mlx_server.system.process import keep_time_slices
from tests.hostile.outbound import sitecustomize as outbound
from tests.live.fork_server import unchanged_environment

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("other", max_examples=1000, deadline=None)
settings.load_profile("same")

ALONE = "alone"
COVERAGE = pytest.StashKey[dict[str, str]]()
"""The variables of the tool that measures coverage."""

gc.disable()  # until all tests are collected


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        _hide_coverage(config)
    else:
        _share_a_cache(config)
    keep_time_slices()  # as an engine's process, also for the engines in a test's own
    handle, os.environ[outbound.VARIABLE] = tempfile.mkstemp(prefix="outbound-")
    os.close(handle)
    everywhere = [str(Path(outbound.__file__).parent), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, everywhere))
    outbound.watch()
    unchanged_environment()
    # Where the suite runs in a shell's background, all that it starts would ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _hide_coverage(config: pytest.Config) -> None:
    """A pytest that a test starts would measure too, and its reports replace those of this one."""
    config.stash[COVERAGE] = {
        k: os.environ.pop(k) for k in [*os.environ] if k.startswith("SLIPCOVER")
    }


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    hidden = session.config.stash.get(COVERAGE, None)
    os.environ.update(hidden or {})


def _share_a_cache(config: pytest.Config) -> None:
    """A replay model's checkpoint is made once for all tests of a run: gpt-oss's takes seconds. The
    demo model stays in the user's cache."""
    demo = cache_dir() / "demo"
    demo.mkdir(parents=True, exist_ok=True)
    folder = tempfile.TemporaryDirectory(prefix="cache-")
    config.add_cleanup(folder.cleanup)
    Path(folder.name, "demo").symlink_to(demo)
    os.environ["MLX_SERVER_CACHE"] = folder.name


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests marked `alone` run, files without one are not even imported."""
    if config.option.markexpr != ALONE or collection_path.suffix != ".py":
        return None
    return f"mark.{ALONE}" not in collection_path.read_text() or None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Thousands of tests stay to the end: no collection of garbage need look at them again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    os.unlink(os.environ.pop(outbound.VARIABLE))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """What a file's tests left open is found in that file, and not in one that runs later."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()  # what is left are caches and fixtures of all files: a gigabyte to look through


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Also of what its servers did since the test before it."""
    yield
    assert not outbound.attempts()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


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
    from mlx_server.worker import weights

    return weights.loaded(tiny_path)


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model, which is real; fetched once per machine."""
    with outbound.allowed():
        return resolve("demo:smollm2", lambda what, done, total: None)


@pytest.fixture(scope="session")
def shallow_path(tmp_path_factory: pytest.TempPathFactory, demo_path: Path) -> Path:
    """The demo model's first layers: its tokenizer, template and widths at a fourth of its cost."""
    from tests.tiny import shallow_copy

    return shallow_copy(demo_path, tmp_path_factory.mktemp("shallow") / "demo")
