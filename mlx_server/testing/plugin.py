"""The pytest plugin: the fixture `mlx_replay`. `-p no:mlx_server.testing.plugin` turns it off."""

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mlx_server.testing.kit import MlxReplay
    from mlx_server.testing.server import TestRunServer

FIXTURE = "mlx_replay"


@pytest.fixture(scope="session")
def _mlx_replay_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[TestRunServer]":
    from mlx_server.testing.server import TestRunServer

    server = TestRunServer(tmp_path_factory.mktemp("mlx_replay"))
    yield server
    server.stop()


@pytest.fixture
def mlx_replay(_mlx_replay_server: "TestRunServer") -> "MlxReplay":
    """A server of OpenAI's API that answers what this test gives it: see mlx_server.testing."""
    from mlx_server.testing.kit import MlxReplay

    _mlx_replay_server.begin_test()
    return MlxReplay(_mlx_replay_server)


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
