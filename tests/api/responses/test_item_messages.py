"""Items become the messages of a conversation, and its turns."""

import pytest

from mlx_server.api.responses.input import input_items, to_request
from mlx_server.api.responses.items import read_items, wire
from mlx_server.http.security import Signer
from mlx_server.messages import Conversation, Message
from tests.api.responses.bodies import (
    ASSISTANT,
    SIGNER,
    THOUGHT,
    TURNS,
    USER,
    USER_SAID,
    Json,
    body,
    conversation,
    messages,
    unknown,
)


@pytest.mark.parametrize(("items", "turns"), TURNS.values(), ids=TURNS)
def test_items_become_turns(items: list[Json], turns: list[Message]) -> None:
    assert messages(*items) == turns


@pytest.mark.parametrize(("items", "turns"), TURNS.values(), ids=TURNS)
def test_so_do_items_that_were_kept(items: list[Json], turns: list[Message]) -> None:
    kept = [wire(item) for item in read_items(items)]
    assert list(conversation(kept, input=[]).messages) == turns
    assert all(item["id"] for item in kept)


@pytest.mark.parametrize(
    ("more", "reasoning"),
    [
        ({"content": None, "summary": [], "encrypted_content": SIGNER.seal("é")}, "é"),
        ({"content": None, "summary": [{"type": "summary_text", "text": "short"}]}, "short"),
        ({"encrypted_content": "someone else's"}, "hm"),
        ({"encrypted_content": None, "summary": None, "status": None}, "hm"),
        ({"content": [], "encrypted_content": None}, None),
    ],
)
def test_reasoning_in_each_of_its_forms(more: Json, reasoning: str | None) -> None:
    (turn,) = messages({**THOUGHT, "summary": [], **more}, ASSISTANT)
    assert turn == Message("assistant", "so", reasoning=reasoning)


@pytest.mark.parametrize("token", ["gAAAAABo", Signer(b"theirs").seal("hm"), "mlx3.%", "x" * 99])
def test_reasoning_that_is_sealed_by_others_is_dropped(token: str) -> None:
    item = {"type": "reasoning", "encrypted_content": token, "summary": []}
    found = body(input=[USER, item, ASSISTANT])
    made = to_request(found, input_items(found, unknown), opened=SIGNER.opened)
    (prompt,) = made.request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.messages == (USER_SAID, Message("assistant", "so"))
    assert made.ignored == ("input.encrypted_content",)
    own = body(input=[USER, {**item, "encrypted_content": SIGNER.seal("hm")}, ASSISTANT])
    made = to_request(own, input_items(own, unknown), opened=SIGNER.opened)
    (prompt,) = made.request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.messages[1].reasoning == "hm"
    assert made.ignored == ()
