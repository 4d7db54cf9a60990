"""How long a row may reason: its tokens are counted between marks, and end where they must."""

import sys
from collections.abc import Sequence

import msgspec

from mlx_server.engine.messages import Thinking


class ThinkingBudget:
    def __init__(self, thinking: Thinking, text: Sequence[bytes]) -> None:
        """text: of each token, see token_trie.py."""
        self.end = list(thinking.end)
        self._text = text
        self._left = sys.maxsize if thinking.budget is None else thinking.budget
        self._answer = sys.maxsize if thinking.answer is None else thinking.answer
        self._inside = thinking.inside
        self._opens, self._closes = thinking.opens, thinking.closes
        self._tail_bytes = max(map(len, [*self._opens, *self._closes]), default=1) - 1
        self._tail = b""
        """What could be the beginning of a mark."""
        self._forced: list[int] = []
        self._longer_rests: list[bytes] = []
        """What may follow the mark before, and make a longer one of it;"""
        self._longer_begun = b""
        """... so far,"""
        self._held = 0
        """... in so many tokens, which count if it does not."""
        self.was_ended = False
        """Whether the last token was the last of the end that was put."""

    @property
    def inside(self) -> bool:
        return self._inside

    @property
    def answer(self) -> int:
        """Tokens that will still be taken behind the reasoning."""
        return self._answer

    @property
    def used_up(self) -> bool:
        """Reasoning has to end, and its end has not begun."""
        return self._inside and self._left <= 0 and not self._forced

    @property
    def next(self) -> int | None:
        """The one token that may follow, while reasoning is brought to its end."""
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
        """Whether it was reasoning, or the last of it after a mark."""
        tail = self._tail + text
        passed = False
        self._longer_begun += text if self._longer_rests else b""
        while behind := self._end_of_delimiter(tail):
            self._inside = not self._inside
            self._longer_rests = self._longer(tail[:behind]) if self._inside else []
            tail = tail[behind:]
            self._longer_begun, self._held = tail, 0
            passed = True
        self._tail = tail[-self._tail_bytes :] if self._tail_bytes else b""
        return self._inside and (bool(tail) or not passed)

    def _longer(self, text: bytes) -> list[bytes]:
        """What is missing of marks that begin with one that this ends with."""
        ends = [mark for mark in self._opens if text.endswith(mark)]
        return [o[len(m) :] for m in ends for o in self._opens if o != m and o.startswith(m)]

    def _reasoning_tokens(self) -> int:
        """How many tokens of reasoning there are more than was known."""
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
        """Where the mark ends that is complete first, so that it counts not how text is cut."""
        marks = self._closes if self._inside else self._opens
        found = ((tail.find(mark), len(mark)) for mark in marks)
        return min((at + length for at, length in found if at >= 0), default=0)


def end_reasoning_early(
    forced_tokens: Sequence[int], thinking: Thinking, text: Sequence[bytes]
) -> list[int]:
    """What a replay model says whose reasoning is ended: the rest of it is left out."""
    told = ThinkingBudget(thinking, text)
    own = ThinkingBudget(msgspec.structs.replace(thinking, budget=sys.maxsize), text)
    said: list[int] = []
    for at, token in enumerate(forced_tokens):
        if told.used_up:
            behind = _after_reasoning(forced_tokens, at, own)
            said += told.end
            return said + _without_repeated(told.end, forced_tokens[behind:] or forced_tokens[-1:])
        said.append(token)
        told.advance(token)
        own.advance(token)
    return said


def _after_reasoning(forced_tokens: Sequence[int], at: int, own: ThinkingBudget) -> int:
    while at < len(forced_tokens) and own.inside:
        own.advance(forced_tokens[at])
        at += 1
    return at


def _without_repeated(end: Sequence[int], forced_tokens: Sequence[int]) -> list[int]:
    """The end of reasoning leads on to the answer, as the script does by itself."""
    alike = (n for n in range(len(end), 0, -1) if [*end[-n:]] == [*forced_tokens[:n]])
    return [*forced_tokens[next(alike, 0) :]]
