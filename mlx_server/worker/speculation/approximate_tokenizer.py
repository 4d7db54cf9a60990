"""Cuts text into tokens nearly as the model's tokenizer does, from the bytes of its tokens alone.

The engine has no tokenizer, and reading one takes most of a second. A draft needs the tokens that a
model would choose in nine of ten cases: byte pairs are merged in the order of their ids, as they
are in nearly all vocabularies, within words that are split as GPT-2, Llama 3 or Qwen do.
"""

import re
from collections.abc import Mapping
from itertools import pairwise

SPLIT = re.compile(
    r"\d{1,3}| ?[^\W\d_]+| ?[!-/:-@\[-`{-~]+|\s+(?!\S)|\s|[^\w\s]"  # the range is ASCII's marks
)
LED = re.compile(
    r"\d{1,3}|[^\W\d_]+|[^\w\r\n][^\W\d_]+|_[^\W\d_]+| ?[!-/:-@\[-`{-~]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s|[^\w\s]"
)
"""As SPLIT, but one mark leads the word after it, as in `(self`."""
LEADS = (b"(self", b".get", b"_id", b".append")
"""Tokens that only vocabularies have that are split so."""
LONGEST = 32
"""The most characters that are merged at once: it takes time by their square."""


class ApproximateTokenizer:
    def __init__(self, ids: Mapping[bytes, int]) -> None:
        """ids: of the bytes of each token but control tokens."""
        self._ids = ids
        self._split = LED if any(lead in ids for lead in LEADS) else SPLIT

    def tokens(self, text: bytes, most: int) -> list[int]:
        """Returns at most so many tokens: those before what no token can spell."""
        tokens = list[int]()
        for word in self._split.finditer(text.decode("utf-8", "ignore")):
            part = word[0]
            for begin in range(0, len(part), LONGEST):
                for piece in self._merged(part[begin : begin + LONGEST].encode()):
                    if piece not in self._ids or len(tokens) >= most:
                        return tokens
                    tokens.append(self._ids[piece])
        return tokens

    def _merged(self, word: bytes) -> list[bytes]:
        if word in self._ids:
            return [word]
        parts = [word[at : at + 1] for at in range(len(word))]
        while len(parts) > 1:
            pairs = [
                (id, at)
                for at, pair in enumerate(pairwise(parts))
                if (id := self._ids.get(b"".join(pair))) is not None
            ]
            if not pairs:
                break
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts
