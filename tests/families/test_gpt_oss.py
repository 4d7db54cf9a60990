"""The family of gpt-oss: how it is found, and its golden prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_server.families import family_of
from mlx_server.families.harmony import GPT_OSS
from mlx_server.messages import Conversation, Message, Tool, ToolCall
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.prompts.harmony.vocabulary import encoding
from tests.prompts.harmony.gpt_oss import gpt_oss_checkpoint, text_of

GOLDEN = Path(__file__).parent / "golden" / "gpt_oss"


def read(path: Path) -> Conversation:
    found = json.loads(path.read_text("utf-8"))
    return Conversation(
        messages=tuple(_message(message) for message in found["messages"]),
        tools=tuple(Tool(**tool) for tool in found.get("tools", ())),
        template_kwargs=found["template_kwargs"],
        response_format=found.get("response_format"),
    )


def _message(found: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in found.pop("tool_calls", ()))
    return Message(**found, tool_calls=calls)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return gpt_oss_checkpoint(tmp_path_factory.mktemp("gpt-oss"))


PROMPTS = sorted(path.stem for path in GOLDEN.glob("*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_golden_prompts(gpt_oss: Checkpoint, name: str) -> None:
    path = GOLDEN / f"{name}.json"
    assert text_of(gpt_oss, read(path)) == path.with_suffix(".txt").read_text("utf-8")


def test_the_family_is_found_by_the_models_type(gpt_oss: Checkpoint) -> None:
    assert family_of(gpt_oss) is GPT_OSS
    stops = {encoding().encode(t, allowed_special="all")[0] for t in GPT_OSS.stop_tokens}
    assert GPT_OSS.stops(gpt_oss) == stops == {199_999, 200_002, 200_012}
