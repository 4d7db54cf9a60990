from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.live.common import common_server
from tests.live.server import DEMO, SHALLOW, TINY, LiveServer


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, demo_path: Path, shallow_path: Path, tiny_path: Path
) -> Iterator[LiveServer]:
    """One for all tests that leave it as it was: what they do is no error to its log."""
    checkpoints = {DEMO: demo_path, SHALLOW: shallow_path, TINY: tiny_path}
    with common_server(tmp_path_factory.mktemp("server"), checkpoints) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    """A client of the module's own server, if the module has one."""
    with server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http
