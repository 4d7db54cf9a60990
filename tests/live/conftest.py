from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.live.server import DEMO, DEMO_MODEL, SAMPLES, SHALLOW, TINY, LiveServer, serving


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, demo_path: Path, shallow_path: Path, tiny_path: Path
) -> Iterator[LiveServer]:
    """One for all tests that leave it as it was: what they do is no error to its log."""
    tiny = {"source": str(tiny_path), "aliases": ["small"]}
    shallow = {"source": str(shallow_path)}
    config = {
        "server": {"adapter_dirs": [str(SAMPLES)]},
        "models": {DEMO: DEMO_MODEL, TINY: tiny, SHALLOW: shallow},
    }
    with serving(tmp_path_factory.mktemp("server"), config) as server:
        yield server
        assert "Traceback" not in server.log
        assert " ERROR " not in server.log


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    """A client of the module's own server, if the module has one."""
    with server.openai() as client:
        yield client
