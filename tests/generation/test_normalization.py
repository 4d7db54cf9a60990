"""Volatile lines are taken out of all prompts, unless the owner keeps them."""

from dataclasses import replace

from mlx_server.generation.rendering import without_volatile_lines
from mlx_server.messages import Conversation, Message
from mlx_server.pool.prepare import ModelSpec
from tests.generation.scripted import ASKED

LINE = "x-anthropic-billing-header: cc_version=2.1.100; cch=eb6c6;"
HI = Message("user", "Hi")


def test_they_are_taken_out_of_conversations_and_named_once(spec: ModelSpec) -> None:
    chat = Conversation((Message("system", f"{LINE}\nBe brief."), HI))
    request = replace(ASKED, prompts=(chat, LINE, chat))
    cleaned, names = without_volatile_lines(spec, request)
    short = Conversation((Message("system", "Be brief."), HI))
    assert cleaned.prompts == (short, LINE, short)
    assert names == ("x-anthropic-billing-header",)
    keeping = replace(spec, volatile_lines="keep")
    assert without_volatile_lines(keeping, request) == (request, ())
