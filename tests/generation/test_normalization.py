"""Volatile lines are taken out of all prompts."""

from dataclasses import replace

from mlx_server.generation.rendering import without_volatile_lines
from mlx_server.messages import Conversation, Message
from tests.generation.scripted import ASKED

LINE = "x-anthropic-billing-header: cc_version=2.1.100; cch=eb6c6;"
HI = Message("user", "Hi")


def test_they_are_taken_out_of_conversations_and_named_once() -> None:
    chat = Conversation((Message("system", f"{LINE}\nBe brief."), HI))
    request = replace(ASKED, prompts=(chat, LINE, chat))
    cleaned, names = without_volatile_lines(request)
    short = Conversation((Message("system", "Be brief."), HI))
    assert cleaned.prompts == (short, LINE, short)
    assert names == ("x-anthropic-billing-header",)
