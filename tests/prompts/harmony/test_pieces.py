"""Long conversations are rendered in pieces, so that no thread waits for the library for long."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai_harmony import DeveloperContent, HarmonyEncoding

from mlx_server import limits
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.prompts.harmony import prompt, tools_text
from mlx_server.prompts.harmony.vocabulary import encoding
from tests.tables import cases

WORDS = "Rain, in Paris?\n\n  It's 12345 mm  \r\n\tsaid the ÉCOLE's 漢字。(so) " * 700
TEXTS = {
    "words": WORDS,
    "no spaces": WORDS.replace(" ", "").replace("\n", ""),
    "JSON": '{"a":1,"b":[2,3]},' * 3000,
}
TOOLS = (Tool("f", "It rains.", {"type": "object", "properties": {"a": {"type": "string"}}}),)


class Counted:
    """The library, which counts the characters, messages and bytes of tools of each call."""

    def __init__(self, whole: HarmonyEncoding) -> None:
        self._whole = whole
        self.characters = self.messages = self.tools = 0

    def encode(self, text: str, **more: Any) -> list[int]:
        self.characters = max(self.characters, len(text))
        return list(self._whole.encode(text, **more))

    def render_conversation(self, conversation: Any, config: Any = None) -> list[int]:
        self.messages = max(self.messages, len(conversation.messages))
        contents = [each for message in conversation.messages for each in message.content]
        total = sum(len(getattr(each, "text", "")) for each in contents)
        self.characters = max(self.characters, total)
        own = [each for each in contents if isinstance(each, DeveloperContent)]
        self.tools = max(self.tools, sum(len(each.model_dump_json()) for each in own))
        return list(self._whole.render_conversation(conversation, config))

    def decode(self, tokens: list[int]) -> str:
        return str(self._whole.decode(tokens))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    made = Counted(encoding())
    for module in (prompt, tools_text):
        monkeypatch.setattr(module, "encoding", lambda: made)
    yield made
    assert made.characters <= 3 * tools_text.WINDOW
    assert made.messages <= prompt.CHUNK


def rendered(conversation: Conversation) -> list[int]:
    return prompt._rendered(list(prompt._messages(conversation)), conversation)


@pytest.mark.slow
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
        patched.setattr(tools_text, "WINDOW", 1 << 24)
        patched.setattr(prompt, "CHUNK", 1 << 24)
        assert rendered(conversation) == found


def typed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties][:1]}


SCHEMAS: tuple[dict[str, Any], ...] = (
    {},
    typed(),
    {**typed(a={"type": "string", "description": "b\nc"}), "description": tools_text.BEGIN},
    typed(a={"enum": ["b", "<|call|>"]}, b={"type": ["string", "null"], "default": "c"}),
    typed(a={"anyOf": [{"const": 1}, typed(a={"type": "array", "items": {}})]}, b={"enum": [1]}),
)


@cases
def test_tools_one_at_a_time_give_the_tokens_of_all(
    described: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tuple(Tool(f"f{at}", described, schema) for at, schema in enumerate(SCHEMAS))
    format = {"name": "x", "schema": {}}
    said = (Message("system", "Hi."), Message("user", "hi"))
    for conversation in (Conversation(said, tools), Conversation(said[1:], tools, format)):
        found = rendered(conversation)
        with monkeypatch.context() as patched:
            patched.setattr(prompt, "WHOLE", 0)
            assert rendered(conversation) == found


WORDY = "It rains. " * 200


@pytest.mark.slow
def test_many_tools_are_not_given_to_the_library_at_once(counted: Counted) -> None:
    schema = typed(**{f"p{at}": {"type": "string", "description": WORDY} for at in range(3)})
    tools = (*(Tool(f"f{at}", WORDY, schema) for at in range(100)), Tool("g", WORDY * 50))
    found = rendered(Conversation((Message("user", "hi"),), tools))
    assert encoding().decode(found).count(WORDY) == 4 * 100 + 50
    assert 0 < counted.tools < tools_text.WHOLE


LARGE: dict[str, Any] = {
    "a text": {"description": " a" * (limits.HARMONY_PARAMETERS // 2)},
    "numbers": {"enum": [1] * (limits.HARMONY_PARAMETERS // 5)},
    "objects": {"enum": [{}] * (limits.HARMONY_PARAMETERS // 4)},
    "names": {"properties": {f"a{at}": {} for at in range(limits.HARMONY_PARAMETERS // 8)}},
}


@pytest.mark.parametrize("name", LARGE)
def test_a_tool_that_is_too_large_is_refused(name: str) -> None:
    tool = Tool("large", "", typed(a=LARGE[name]))
    with pytest.raises(BadRequest, match="parameters of tool 'large' have more than") as refused:
        rendered(Conversation((Message("user", "hi"),), (tool,)))
    assert refused.value.param == "tools"
