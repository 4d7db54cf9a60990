"""Text counts as the memory that it takes."""

import pytest

from mlx_server.messages import Conversation, Message
from mlx_server.prompts.text_size import WINDOW, characters_of, memory_of


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", 0),
        ("ab", 2),
        ("é", 1),
        ("a‹", 4),
        ("a\U0001f600", 8),
        ("a" * 2 * WINDOW + "‹", 4 * WINDOW + 2),
        ("‹" + "a" * 2 * WINDOW + "\U0001f600", 8 * WINDOW + 8),
    ],
    ids=range(7),
)
def test_the_widest_character_counts_for_all_of_its_text(text: str, size: int) -> None:
    text.encode()
    assert memory_of(text) == size
    assert memory_of({"a": [text, ("b", Message("user", text))]}) == 2 * size + len("abuser")


def test_characters_are_counted_wherever_they_stand() -> None:
    said = Conversation((Message("user", "hi", name="\U0001f600"),))
    assert characters_of(said) == len("userhi\U0001f600")
