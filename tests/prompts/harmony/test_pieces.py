"""Long conversations are rendered in pieces, so that no thread waits for the library for long."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai_harmony import HarmonyEncoding

from mlx_server.messages import Conversation, Message, Tool
from mlx_server.prompts.harmony import prompt, text_pieces
from mlx_server.prompts.harmony.vocabulary import encoding

WORDS = "Rain, in Paris?\n\n  It's 12345 mm  \r\n\tsaid the ÉCOLE's 漢字。(so) " * 700
TEXTS = {
    "words": WORDS,
    "no spaces": WORDS.replace(" ", "").replace("\n", ""),
    "JSON": '{"a":1,"b":[2,3]},' * 3000,
}
TOOLS = (Tool("f", "It rains.", {"type": "object", "properties": {"a": {"type": "string"}}}),)


class Counted:
    """The library, which counts the characters and messages of each call."""

    def __init__(self, whole: HarmonyEncoding) -> None:
        self._whole = whole
        self.characters = self.messages = 0

    def encode(self, text: str, **more: Any) -> list[int]:
        self.characters = max(self.characters, len(text))
        return list(self._whole.encode(text, **more))

    def render_conversation(self, conversation: Any, config: Any) -> list[int]:
        self.messages = max(self.messages, len(conversation.messages))
        contents = [each for message in conversation.messages for each in message.content]
        total = sum(len(getattr(each, "text", "")) for each in contents)
        self.characters = max(self.characters, total)
        return list(self._whole.render_conversation(conversation, config))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    made = Counted(encoding())
    monkeypatch.setattr(prompt, "encoding", lambda: made)
    yield made
    assert made.characters <= 3 * text_pieces.WINDOW
    assert made.messages <= prompt.CHUNK


def rendered(conversation: Conversation) -> list[int]:
    return prompt._rendered(list(prompt._messages(conversation)), conversation)


@pytest.mark.parametrize("name", TEXTS)
def test_pieces_give_the_tokens_of_the_whole(
    name: str, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TEXTS[name]
    turns = [Message("system", text), *[Message("user", "hi")] * 200, Message("user", text)]
    conversation = Conversation((*turns, Message("assistant", text), turns[1]), tools=TOOLS)
    found = rendered(conversation)
    assert encoding().decode(found).count("hi") >= 201
    with monkeypatch.context() as patched:  # all in one call, but for words that are too long
        patched.setattr(prompt, "encoding", encoding)
        patched.setattr(prompt, "WINDOW", 1 << 24)
        patched.setattr(text_pieces, "WINDOW", 1 << 24)
        patched.setattr(prompt, "CHUNK", 1 << 24)
        assert rendered(conversation) == found
