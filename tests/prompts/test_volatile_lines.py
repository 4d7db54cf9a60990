"""What a client changes with every request, and what means nothing, is no part of the prompt."""

import pytest

from mlx_server.messages import Conversation, Message
from mlx_server.prompts.message_normalization import without_volatile_lines

BILLING = "x-anthropic-billing-header"
ASKED = Message("user", "hi")

SENT = [
    f"{BILLING}: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;",
    f"{BILLING}: cc_version=2.1.222; cc_prev_req=req_011Cdk3;",
    f"{BILLING}: cc_version=9.9.9; cc_entrypoint=sdk-cli; cch=71fea",
    f"{BILLING}:cch=1;  ",
]
"""As clients send it."""


def left_of(*systems: str, role: str = "system") -> tuple[list[str], tuple[str, ...]]:
    messages = (*(Message(role, text) for text in systems), ASKED)  # type: ignore[arg-type]
    conversation, names = without_volatile_lines(Conversation(messages))
    assert conversation.messages[-1] == ASKED
    return [message.content for message in conversation.messages[:-1]], names


@pytest.mark.parametrize("line", SENT)
def test_a_line_is_taken_out(line: str) -> None:
    assert left_of(f"{line}\nA\nB") == (["A\nB"], (BILLING,))
    assert left_of(f"{line}\r\nA\r\nB") == (["A\r\nB"], (BILLING,))
    assert left_of(f"A\n{line}\nB") == (["A\nB"], (BILLING,))
    assert left_of(f"A\nB\n{line}") == (["A\nB\n"], (BILLING,))
    assert left_of(line, "A", "B") == (["A", "B"], (BILLING,))
    assert left_of(line) == ([], (BILLING,))
    assert left_of(f"{line}\nA", f"{line}\nB", role="developer") == (["A", "B"], (BILLING,))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A",
        f"{BILLING}",
        f"{BILLING}: a",
        f"The line `{SENT[0]}` is for billing.",
        f"  {SENT[0]}",
        f"{SENT[0]} It is the first line.",
        f"{BILLING}: a=b; is not of interest.",
        f"{BILLING}: cch=a\u2028b c",
        "Today's date: 2026-11-23\n<total_tokens>100</total_tokens>",
        '{"message_id": "6678"}',
    ],
)
def test_anything_else_is_left_alone(text: str) -> None:
    assert left_of(text) == ([text], ())


def test_only_the_system_prompt_is_searched() -> None:
    messages = (Message("user", SENT[0]), Message("system", SENT[0]))
    conversation = Conversation(messages)
    assert without_volatile_lines(conversation) == (conversation, ())


@pytest.mark.parametrize(
    "hostile",
    [
        f"{BILLING}: " + "a=" * 100_000 + " x y",
        f"{BILLING}: " + "a=b;" * 100_000 + " x y",
        f"{BILLING}: " + "a=b; \t" * 50_000 + "x",
        f"{BILLING}: a=b" + " " * 200_000 + "x",
        f"{BILLING}: " * 20_000,
        f"{BILLING}:\n" * 20_000,
    ],
    ids=["pairs in pairs", "pairs", "spaces", "a gap", "names", "lines"],
)
def test_hostile_text_is_read_in_one_pass(hostile: str) -> None:
    assert left_of(hostile) == ([hostile], ())
