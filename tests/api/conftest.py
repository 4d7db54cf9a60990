from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.api import wire
from tests.api.wire import ScriptedEngine
from tests.live.server import eventually


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def client(tiny_path: Path, engine: ScriptedEngine) -> Iterator[TestClient]:
    with wire.client(tiny_path, engine) as client:
        yield client


@pytest.fixture
def _as_before(engine: ScriptedEngine) -> Iterator[None]:
    """Also of tests that make it silent, or fail."""
    yield
    engine.silent, engine.failure, engine.drafts = False, None, None
    eventually(lambda: not engine.running, "each answer has left the engine")
