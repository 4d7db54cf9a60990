from collections.abc import Iterator

import pytest

from tests.upstream.playing import PlayingServer


@pytest.fixture(scope="session")
def upstream() -> Iterator[PlayingServer]:
    """One server for all tests; each says first what it plays."""
    with PlayingServer() as server:
        yield server
