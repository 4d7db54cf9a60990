"""Messages that an answer continues, by the names of vLLM."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.api import wire
from tests.api.chat_completions.asking import USER, asked
from tests.api.wire import Json, ok

pytestmark = pytest.mark.usefixtures("_as_before")


# The last message to be continued

BEGUN: Json = {"role": "assistant", "content": "It is in"}


@pytest.mark.parametrize(
    ("given", "continues"),
    [
        ({}, False),
        ({"continue_final_message": True}, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, True),
        ({"add_generation_prompt": False}, True),
        ({"add_generation_prompt": True}, False),
        ({"add_generation_prompt": True, "continue_final_message": False}, False),
        ({"continue_final_message": None, "add_generation_prompt": None}, False),
    ],
)
def test_the_wish_to_continue_a_message(given: Json, continues: bool) -> None:
    assert asked(messages=[USER, BEGUN], **given)[1].continue_final_message is continues


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
def test_the_engine_gets_an_open_message(
    client: TestClient, engine: wire.ScriptedEngine, tiny_path: Path, path: str
) -> None:
    body = {"model": wire.MODEL, "messages": [USER, BEGUN], "continue_final_message": True}
    ok(client.post(path, json=body))
    continued = engine.taken[-1].prompt
    ok(client.post(path, json={**body, "continue_final_message": False}))
    assert engine.taken[-1].prompt[: len(continued)] == continued
    assert engine.taken[-1].prompt != continued
