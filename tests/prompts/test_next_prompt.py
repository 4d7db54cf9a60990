"""The beginning of a conversation's next prompt is known before its message, in every family."""

from dataclasses import replace

import pytest

from mlx_server.messages import Conversation, Message, ToolCall
from mlx_server.prompts.branches import next_beginning
from tests.families.prompts import GoldenPrompt, conversation_named, golden_prompts
from tests.prompts.test_branches import common_tokens, tokens_of

ANSWER = Message("assistant", "It rains there.", reasoning="Look outside.")
QUESTIONS = ["And tomorrow?", "\n\nWhat now?", "<system-reminder>\nBe brief.", "1", "- a"]

LOST = 4
"""Tokens of the next message's own beginning, which may be the same for many messages."""


def continued(asked: Conversation, answer: Message, text: str) -> Conversation:
    results = [
        Message("tool", text, tool_call_id=call.id, name=call.name) for call in answer.tool_calls
    ]
    following = results or [Message("user", text)]
    return replace(asked, messages=(*asked.messages, answer, *following))


def check(golden: GoldenPrompt, asked: Conversation, sent: Message, answer: Message) -> None:
    """sent: the answer as the client sends it back."""
    begins = next_beginning(asked, answer, lambda each: tokens_of(golden.family, each))
    prompts = [tokens_of(golden.family, continued(asked, sent, text)) for text in QUESTIONS]
    for prompt in prompts:
        assert prompt[: len(begins)] == begins
    shared = min(common_tokens(prompts[0], prompt) for prompt in prompts[1:])
    assert shared - len(begins) <= LOST


WITH_A_NEXT_TURN = [
    golden
    for golden in golden_prompts()
    if "refused" not in golden.conversation
    and not conversation_named(golden.conversation).continued
]


@pytest.mark.slow
@pytest.mark.parametrize("golden", WITH_A_NEXT_TURN, ids=str)
def test_it_ends_where_the_next_message_or_the_results_of_calls_begin(golden: GoldenPrompt) -> None:
    asked = conversation_named(golden.conversation)
    thinks = any(m.role == "assistant" and m.reasoning for m in asked.messages)
    check(golden, asked, ANSWER if thinks else replace(ANSWER, reasoning=None), ANSWER)
    if asked.tools:
        call = ToolCall("call_12345678", asked.tools[-1].name, '{"city": "Lima"}')
        answer = Message("assistant", tool_calls=(call,))
        check(golden, asked, answer, answer)


def words(conversation: Conversation) -> list[int]:
    """A template that renders everything, thoughts included."""
    texts = (f"{m.role}:{m.reasoning or ''}:{m.content}." for m in conversation.messages)
    return list("".join(texts).encode())


@pytest.mark.parametrize("before", [None, "Hm."])
def test_thoughts_are_sent_back_if_earlier_ones_were(before: str | None) -> None:
    asked = Conversation(
        (Message("user", "a"), Message("assistant", "b", reasoning=before), Message("user", "c"))
    )
    answer = Message("assistant", "d", reasoning="Yes.")
    begins = bytes(next_beginning(asked, answer, words)).decode()
    assert begins.endswith(f"assistant:{'Yes.' if before else ''}:d.user::")
