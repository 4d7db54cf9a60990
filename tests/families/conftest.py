"""A checkpoint of a type that no family has."""

import pytest

from mlx_server.models.checkpoint import Checkpoint
from tests.families import byte_level, checkpoint


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("unknown"), byte_level(), "{{ messages }}")
