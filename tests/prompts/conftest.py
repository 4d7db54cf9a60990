"""A checkpoint whose prompts show everything."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlx_server.models.checkpoint import Checkpoint, read_checkpoint
from mlx_server.system.sandbox.chat_template import ChatTemplate
from tests.prompts.template_prompts import EVERYTHING


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> Checkpoint:
    return read_checkpoint(demo_path)


@pytest.fixture(scope="module")
def demo_everything(demo: Checkpoint) -> Checkpoint:
    return replace(demo, template=ChatTemplate(EVERYTHING))
