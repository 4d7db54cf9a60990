"""Facts about the tokens of a tokenizer.json, shared by the server and the engine process."""

from collections.abc import Container
from functools import lru_cache


def is_control(content: str, special: bool) -> bool:
    """Whether an added token is a control token, which ordinary text never becomes."""
    return bool(content) and (special or _looks_like_markup(content))


def is_letter(content: str, vocabulary: Container[str]) -> bool:
    """Whether an added token is a single character of the vocabulary: text, although some files
    name one, such as `!`, as the special token for padding."""
    return len(content) == 1 and content in vocabulary


def _looks_like_markup(token: str) -> bool:
    return len(token) > 2 and token[0] in "<[" and token[-1] in ">]"


@lru_cache(maxsize=1)
def bytes_to_unicode() -> dict[str, int]:
    """GPT-2's characters for bytes, mapped to the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}
