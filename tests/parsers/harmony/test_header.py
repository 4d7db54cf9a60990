"""Headers of messages, also those that OpenAI's parser can't read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_server.events import TextDelta
from tests.parsers.harmony.played import PIECES, heard, ids, played


@pytest.mark.parametrize(
    ("header", "phase"),
    [
        ("<|channel|>commentary<|message|>", "commentary"),
        ("<|channel|>final<|message|>", "final_answer"),
        ("<|channel|>final <|constrain|>json<|message|>", "final_answer"),
        ("<|channel|>elsewhere<|message|>", "final_answer"),
        ("<|message|>", "final_answer"),
        ("<|channel|>commentary to=functions.unknown<|message|>", "final_answer"),
        ("<|channel|>commentary one, two, three, four<|message|>", "commentary"),
        ("", "final_answer"),
    ],
)
def test_phases(header: str, phase: str) -> None:
    found = [e for e in played(ids(header + "Hello")) if isinstance(e, TextDelta)]
    assert "".join(e.text for e in found).endswith("Hello")
    assert {e.phase for e in found} == {phase}


@settings(max_examples=80)
@given(st.lists(PIECES.filter(lambda piece: "<|" not in piece), max_size=6))
def test_no_word_of_a_garbled_header_is_lost(words: list[str]) -> None:
    text = "".join(words)
    found = "".join(t for _, t in heard(f"<|channel|>final one, two, three, {text}<|message|>four"))
    assert found == f"one, two, three, {text}four"
