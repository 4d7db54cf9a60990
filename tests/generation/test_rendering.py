"""Prompts are rendered, and refused where they are empty or too long."""

from dataclasses import replace
from typing import Any

import pytest

from mlx_server.errors import BadRequest, ContextTooLong
from mlx_server.events import Started
from mlx_server.messages import Conversation, Message
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.pool.prepare import ModelSpec
from tests.generation.scripted import (
    ASKED,
    CONTEXT,
    END,
    PUBLISHERS,
    admitted,
    answered,
    refused,
    said,
    without_fingerprint,
)


def test_a_conversation_is_rendered_and_what_it_can_not_have_is_told(
    spec: ModelSpec, tokenizer: Tokenizer
) -> None:
    asked = [
        Conversation((Message("user", "Hi"),), (), {"x": 1}),
        Conversation((Message("user", "Ho"),), (), {"y": 1}),
    ]
    events, engine = answered(
        spec,
        replace(ASKED, prompts=tuple(asked)),
        [*admitted(0, 1), *said(END, 0, "stop"), *said(END, 1, "stop")],
    )
    prompts = [tokenizer.encode(f"<|im_start|>{word}") for word in ("Hi", "Ho")]
    assert [row.prompt for row in engine.rows] == prompts
    ignored = ("chat_template_kwargs.x", "chat_template_kwargs.y")
    expected = Started("m", sum(map(len, prompts)), ignored, sampling=PUBLISHERS)
    assert without_fingerprint(events[0]) == expected


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 1000])
def test_a_prompt_that_leaves_no_room_is_refused(spec: ModelSpec, length: int) -> None:
    error = refused(spec, replace(ASKED, prompts=("fits", (1,) * length)))
    assert isinstance(error, ContextTooLong)
    assert f"has at least {length} tokens" in error.message
    assert f"is {CONTEXT} tokens" in error.message
    assert error.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "param"), [("", "prompt"), ((), "prompt"), (Conversation(()), "messages")]
)
def test_an_empty_prompt_is_refused(spec: ModelSpec, prompt: Any, param: str) -> None:
    error = refused(spec, replace(ASKED, prompts=("x", prompt)))
    assert isinstance(error, BadRequest)
    assert (error.message, error.param) == ("The prompt is empty.", param)
