"""A checkpoint of gpt-oss without weights."""

import pytest

from mlx_server.models.checkpoint import Checkpoint
from tests.prompts.harmony.gpt_oss import gpt_oss_checkpoint


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return gpt_oss_checkpoint(tmp_path_factory.mktemp("gpt-oss"))
