"""Counts a row's reasoning tokens between delimiters and forces the reasoning to end in time."""

import sys
from collections.abc import Sequence

import msgspec

from mlx_server.engine.messages import Thinking


class ThinkingBudget:
    def __init__(self, thinking: Thinking, text: Sequence[bytes]) -> None:
        """text: the bytes of each token, see `Vocabulary.text`."""
        self.end = list(thinking.end)
        self._text = text
        self._left = sys.maxsize if thinking.budget is None else thinking.budget
        self._answer = sys.maxsize if thinking.answer is None else thinking.answer
        self._inside = thinking.inside
        self._opens, self._closes = thinking.opens, thinking.closes
        self._tail_bytes = max(map(len, [*self._opens, *self._closes]), default=1) - 1
        self._tail = b""
        """The last bytes of the answer, which may begin a delimiter."""
        self._forced: list[int] = []
        """The tokens still to be forced, at the end of reasoning."""
        self._longer_rests: list[bytes] = []
        """The texts that would turn the opening delimiter just read into a longer one."""
        self._longer_begun = b""
        """The bytes after the opening delimiter just read."""
        self._held = 0
        """The number of tokens after that delimiter; they are reasoning if no longer delimiter
        results."""
        self.was_ended = False
        """Whether the last token completed the forced end of reasoning."""

    @property
    def inside(self) -> bool:
        return self._inside

    @property
    def answer(self) -> int:
        """The number of tokens that the server still takes after the reasoning."""
        return self._answer

    @property
    def used_up(self) -> bool:
        """Whether reasoning has to end and its end has not begun."""
        return self._inside and self._left <= 0 and not self._forced

    def use_up(self) -> bool:
        """Leaves no tokens for reasoning. Returns False if there were none or it is outside."""
        is_open = self._inside and self._left > 0
        self._left = min(self._left, 0)
        return is_open

    @property
    def next(self) -> int | None:
        """The next forced token while reasoning is being ended, else None."""
        return self._forced[0] if self._forced else None

    def close(self) -> None:
        self._forced = list(self.end)

    def advance(self, token: int) -> None:
        reasoned = self._follow(self._text[token] if token < len(self._text) else b"")
        self.was_ended = self._forced == [token]
        if self._forced:
            del self._forced[0]
            self._inside = self._inside and bool(self._forced)
        elif reasoned:
            self._left -= self._reasoning_tokens()
        elif not self._inside:
            self._answer -= 1

    def _follow(self, text: bytes) -> bool:
        """Reads a token's text; returns whether the token counts as reasoning."""
        tail = self._tail + text
        passed = False
        self._longer_begun += text if self._longer_rests else b""
        while end := self._end_of_delimiter(tail):
            self._inside = not self._inside
            self._longer_rests = self._longer(tail[:end]) if self._inside else []
            tail = tail[end:]
            self._longer_begun, self._held = tail, 0
            passed = True
        self._tail = tail[-self._tail_bytes :] if self._tail_bytes else b""
        return self._inside and (bool(tail) or not passed)

    def _longer(self, text: bytes) -> list[bytes]:
        """Returns the missing rests of longer opening delimiters that begin with the one at the
        end of `text`."""
        ends = [mark for mark in self._opens if text.endswith(mark)]
        return [o[len(m) :] for m in ends for o in self._opens if o != m and o.startswith(m)]

    def _reasoning_tokens(self) -> int:
        """Returns how many reasoning tokens to count now: none while they may still belong to a
        longer delimiter, and all held ones once they do not."""
        self._held += 1
        whole = [rest for rest in self._longer_rests if self._longer_begun.startswith(rest)]
        if not whole and any(rest.startswith(self._longer_begun) for rest in self._longer_rests):
            return 0
        found = self._held
        if whole:
            found = int(self._longer_begun not in whole)
        self._longer_rests, self._longer_begun, self._held = [], b"", 0
        return found

    def _end_of_delimiter(self, tail: bytes) -> int:
        """Returns where the first complete delimiter ends, 0 if there is none. The result does not
        depend on how the text is cut into tokens."""
        delimiters = self._closes if self._inside else self._opens
        found = ((tail.find(delimiter), len(delimiter)) for delimiter in delimiters)
        return min((at + length for at, length in found if at >= 0), default=0)


def end_reasoning_early(
    forced_tokens: Sequence[int], thinking: Thinking, text: Sequence[bytes]
) -> list[int]:
    """Cuts the reasoning of a replayed output to the thinking budget."""
    limited = ThinkingBudget(thinking, text)
    unlimited = ThinkingBudget(msgspec.structs.replace(thinking, budget=sys.maxsize), text)
    kept: list[int] = []
    for at, token in enumerate(forced_tokens):
        if limited.used_up:
            rest = forced_tokens[_after_reasoning(forced_tokens, at, unlimited) :]
            kept += limited.end
            return kept + _without_repeated(limited.end, rest or forced_tokens[-1:])
        kept.append(token)
        limited.advance(token)
        unlimited.advance(token)
    return kept


def _after_reasoning(forced_tokens: Sequence[int], at: int, unlimited: ThinkingBudget) -> int:
    while at < len(forced_tokens) and unlimited.inside:
        unlimited.advance(forced_tokens[at])
        at += 1
    return at


def _without_repeated(end: Sequence[int], forced_tokens: Sequence[int]) -> list[int]:
    """Removes what the replayed tokens repeat of the forced end: both lead to the answer."""
    alike = (n for n in range(len(end), 0, -1) if [*end[-n:]] == [*forced_tokens[:n]])
    return [*forced_tokens[next(alike, 0) :]]
