"""The pytest plugin: the fixture `mlx_replay`. `-p no:mlx_server.testing.plugin` turns it off."""

from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mlx_server.testing.kit import MlxReplay
    from mlx_server.testing.server import TestRunServer

FIXTURE = "mlx_replay"

SERVER: "pytest.StashKey[tuple[TestRunServer, TemporaryDirectory[str]]]" = pytest.StashKey()
"""The server of this test run, and its folder."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the server if a test will need it, so that it is ready when that test begins."""
    needed = any(FIXTURE in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.option.collectonly:
        _server(session.config)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if found := session.config.stash.get(SERVER, None):
        server, folder = found
        server.stop()
        folder.cleanup()


@pytest.fixture
def mlx_replay(request: pytest.FixtureRequest) -> "MlxReplay":
    """A server of OpenAI's API that answers what this test gives it: see mlx_server.testing."""
    from mlx_server.testing.kit import MlxReplay

    server = _server(request.config)
    server.begin_test()
    return MlxReplay(server)


def _server(config: pytest.Config) -> "TestRunServer":
    """The one server of this test run."""
    if SERVER not in config.stash:
        from mlx_server.testing.server import TestRunServer

        folder = TemporaryDirectory(prefix="mlx_replay-")
        config.stash[SERVER] = TestRunServer(Path(folder.name)), folder
    return config.stash[SERVER][0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that uses the fixture fails unless its requests and its answers match."""
    fixtures: dict[str, Any] = getattr(item, "funcargs", {})
    kit: MlxReplay | None = fixtures.get(FIXTURE)
    try:
        result = yield
    except Exception:
        if kit:
            _report(item, kit)
        raise
    if kit and (problems := kit.problems()):
        pytest.fail("\n".join(problems), pytrace=False)
    return result


def _report(item: pytest.Item, kit: "MlxReplay") -> None:
    """Shows next to a failure what its cause may be."""
    from mlx_server.testing.server import ServerGone

    try:
        problems = kit.problems()
    except ServerGone as error:
        problems = [str(error)]
    if problems:
        item.add_report_section("call", FIXTURE, "\n".join(problems))
