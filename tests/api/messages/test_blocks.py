"""Blocks that stand for text are read, and others are refused by name."""

import base64

import pytest

from mlx_server.api.messages.protocol import MessagesBody
from mlx_server.messages import Conversation, Message
from tests.api.messages.bodies import (
    HI,
    assistant,
    messages,
    parsed,
    refused,
    result,
    text,
    use,
    user,
)
from tests.sandbox.pdf_files import pdf

# What stands for text


def test_documents_and_search_results_are_read_as_text() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    document = {"type": "document", "source": plain, "title": "Weather", "context": "Today"}
    parts = {"type": "content", "content": [text("One."), text("Two.")]}
    found = {
        "type": "search_result",
        "title": "T",
        "source": "S",
        "content": [text("a"), text("b")],
    }
    (message,) = messages(user(document, {"type": "document", "source": parts}, found))
    assert message.content == "Weather\nToday\nIt rains.\nOne.\nTwo.\nT\nS\na\nb"
    answer = messages(assistant(use("1")), user(result("1", [document])))[1]
    assert answer.content == "Weather\nToday\nIt rains."


def test_the_media_type_of_text_is_not_reported_as_ignored() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    document = {"type": "document", "source": source}
    body = {"model": "m", "max_tokens": 9, "messages": [user(document)]}
    assert MessagesBody.model_validate(body).ignored() == []


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [("application/pdf", pdf("It rains."), "It rains."), ("text/plain", b"It snows.", "It snows.")],
)
def test_documents_in_base64_are_read(kind: str, data: bytes, said: str) -> None:
    source = {"type": "base64", "media_type": kind, "data": base64.b64encode(data).decode()}
    (found,) = messages(user({"type": "document", "source": source, "title": "Weather"}))
    assert said in found.content
    assert "Weather" in found.content


def test_a_system_message_without_text_is_no_message() -> None:
    silent = {"role": "system", "content": [], "output_config": {"effort": "low"}}
    assert messages(HI, silent) == (Message("user", "hi"),)
    assert refused(messages=[silent]).param == "messages"


def test_a_summary_takes_the_place_of_what_it_sums_up() -> None:
    found = messages(assistant({"type": "compaction", "content": "They met."}), HI)
    assert "They met." in found[0].content
    assert messages(assistant({"type": "compaction", "content": None}), HI)[0].content == ""


def test_what_anthropics_own_tools_did_is_left_out_and_listed() -> None:
    given = assistant(
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "redacted_thinking", "data": "xyz"},
        text("So."),
    )
    found = parsed(messages=[HI, given, HI])
    assert found.ignored == (
        "messages.content.server_tool_use",
        "messages.content.web_search_tool_result",
        "messages.content.redacted_thinking",
    )
    (prompt,) = found.request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.messages[1] == Message("assistant", "So.")
