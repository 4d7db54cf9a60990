"""Which added tokens are control tokens, and the characters of bytes."""

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from mlx_server.checkpoints.control_tokens import bytes_to_unicode, is_control


@pytest.mark.parametrize(
    ("content", "special", "expected"),
    [
        ("<|im_end|>", False, True),
        ("<think>", False, True),
        ("[INST]", False, True),
        ("a", True, True),
        ("", True, False),
        ("", False, False),
        ("<>", False, False),
        ("<", False, False),
        ("a>", False, False),
        ("<tool_call> ", False, False),
        ("  ", False, False),
    ],
)
def test_markup_is_control_even_if_it_is_not_marked_as_special(
    content: str, special: bool, expected: bool
) -> None:
    assert is_control(content, special) is expected


def test_each_byte_has_the_character_that_tokenizers_use() -> None:
    table = bytes_to_unicode()
    assert sorted(table.values()) == list(range(256))
    assert table.keys() == set(ByteLevel.alphabet())
    split = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    text = "".join(map(chr, range(0x250))) + "世🙂\U0010ffff"
    ((piece, _),) = split(text)
    assert bytes(table[letter] for letter in piece) == text.encode()
