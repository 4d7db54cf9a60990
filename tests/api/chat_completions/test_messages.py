"""Messages of all shapes, and those that are refused."""

from pathlib import Path

import pydantic
import pytest
from starlette.testclient import TestClient

from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.models.tokenizer import Tokenizer
from tests.api.chat_completions.bodies import BODY, CALL, HI, post
from tests.api.wire import Json, ScriptedEngine, ok

pytestmark = pytest.mark.usefixtures("_as_before")


def written(arguments: str) -> str:
    """A call, where the template has no place for one."""
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "x"}, "x"),
        ({"role": "user", "content": None}, ""),
        ({"role": "user"}, ""),
        ({"role": "user", "content": []}, ""),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, "x"),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "x"},
                    {"type": "input_text", "text": "y"},
                    {"type": "output_text", "text": "z", "annotations": []},
                ],
            },
            "x\ny\nz",
        ),
        ({"role": "system", "content": "x", "name": "me"}, "x"),
        ({"role": "developer", "content": "x"}, "x"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, written('{"a": 1}')),
        ({"role": "assistant", "refusal": "no"}, "no"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"role": "assistant", "content": "x", "reasoning_content": "y", "audio": None}, "x"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, None]}}}],
            },
            written('{"a": [1, null]}'),
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, written("{}")),
    ],
)
def test_messages_of_all_shapes(
    client: TestClient, engine: ScriptedEngine, tiny_path: Path, message: Json, text: str
) -> None:
    ok(post(client, messages=[HI, message, HI]))
    tokenizer = Tokenizer(tiny_path / "tokenizer.json")
    prompt = "".join(tokenizer.spelling(token) for token in engine.taken[-1].prompt)
    role = {"developer": "system"}.get(message["role"], message["role"])
    hi = "<|im_start|>user\nhi<|im_end|>\n"
    assert prompt == (f"{hi}<|im_start|>{role}\n{text}<|im_end|>\n{hi}<|im_start|>assistant\n")


CALLED: Json = {"role": "assistant", "content": "", "tool_calls": [CALL]}


RESULT: Json = {"role": "tool", "tool_call_id": "c1", "content": "x"}


@pytest.mark.parametrize(
    "result", [RESULT, {**RESULT, "content": [{"type": "text", "text": "x"}], "name": "f"}]
)
def test_results_of_all_shapes(
    client: TestClient, engine: ScriptedEngine, tiny_path: Path, result: Json
) -> None:
    ok(post(client, messages=[HI, CALLED, result]))
    tokenizer = Tokenizer(tiny_path / "tokenizer.json")
    prompt = "".join(tokenizer.spelling(token) for token in engine.taken[-1].prompt)
    assert prompt.endswith("<|im_start|>tool\nx<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("name", ["messages", "tools", "modalities", "stop", "guided_choice"])
def test_of_many_wrong_items_one_is_reported(name: str) -> None:
    """Each report takes some 500 bytes, and a body can hold eight million wrong items."""
    with pytest.raises(pydantic.ValidationError) as caught:
        ChatBody.model_validate({**BODY, name: [0] * 1000})
    assert caught.value.error_count() < 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "file", "file": 0}] * 1000},
        {"role": "assistant", "tool_calls": [0] * 1000},
    ],
)
def test_and_of_many_in_a_message(message: Json) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        ChatBody.model_validate({**BODY, "messages": [message] * 1000})
    assert caught.value.error_count() < 5
