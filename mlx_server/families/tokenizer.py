"""Text to token ids and back, from the checkpoint's own tokenizer.json."""

import re
from functools import cached_property, lru_cache
from pathlib import Path

import tokenizers

from mlx_server.errors import ModelUnusable

PENDING_TOKENS = 8
"""A character has at most 4 bytes; more tokens than this without one are not going to make one."""


class Tokenizer:
    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelUnusable(
                f"{path.name} of this model can't be read: {error}. Download the model again."
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Special tokens spelled in the text become special tokens: for text that a template or
        the owner wrote. Rendering keeps everybody else's text apart (families/base.py)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def spelling(self, token: int) -> str:
        """The token as text of its own, special tokens included."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def bytes_of(self, token: int) -> bytes:
        """The token's own bytes, also where they are only a part of a character."""
        text = self.spelling(token)
        if "�" not in text:
            return text.encode()
        raw = self._tokenizer.id_to_token(token) or ""
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", raw):
            return bytes.fromhex(byte[1])
        table = _byte_level()
        return bytes(table[c] for c in raw) if all(c in table for c in raw) else text.encode()

    @cached_property
    def vocabulary(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def control(self) -> re.Pattern[str] | None:
        """Finds where a control token is spelled, overlapping ones too (matches are empty)."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        spelled = [t.content for t in added if t.special or _looks_like_markup(t.content)]
        longest_first = sorted(spelled, key=len, reverse=True)
        return re.compile(f"(?={'|'.join(map(re.escape, longest_first))})") if spelled else None

    def detokenizer(self) -> "Detokenizer":
        return Detokenizer(self)


class Detokenizer:
    """Token ids to text, one at a time; keeps back the bytes of an unfinished character.

    Only a short window is decoded again at each token: what came before it can't change any more.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._settled: list[int] = []
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        self._pending.append(token)
        text = self._pending_text()
        if text.endswith("�") and len(self._pending) < PENDING_TOKENS:
            return ""
        self._settled, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """What is left of an answer that ended inside a character."""
        text = self._pending_text() if self._pending else ""
        self._pending = []
        return text

    def _pending_text(self) -> str:
        # Some decoders strip the first token's space, so a token is decoded behind another one.
        before = self._tokenizer.decode(self._settled)
        return self._tokenizer.decode(self._settled + self._pending)[len(before) :]


def _looks_like_markup(token: str) -> bool:
    return len(token) > 2 and token[0] in "<[" and token[-1] in ">]"


@lru_cache(maxsize=1)
def _byte_level() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(256 + i): byte for i, byte in enumerate(others)}
