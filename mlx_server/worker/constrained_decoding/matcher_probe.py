"""Asks a grammar's matcher what may follow, at a cost that is counted and limited."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from llguidance import LLMatcher

from mlx_server.worker.constrained_decoding.token_classes import Mask, TokenClasses
from mlx_server.worker.constrained_decoding.yielding_matcher import YieldingMatcher

CONSUMED = 6
"""The cost of consuming a token. To ask whether tokens fit costs 1, and 1 more for every eight of
them: one or two microseconds."""

NARROW = 16
"""The most members of an object at which a call costs 1. Where an object lists more, the matcher
reads hundreds of items wherever a value may end, and a call takes up to half a millisecond."""

MEMBERS = 5
"""In an object with more than NARROW members a call costs 1 for every so many of them. After a
digit, where anything but another digit ends a number, it costs 1 for each member."""

DIGITS = frozenset(b"0123456789")


class Probe:
    """A matcher that the search advances and rolls back, within a limit on the cost."""

    def __init__(self, matcher: LLMatcher, classes: TokenClasses, width: int = 0) -> None:
        """width: the number of members of the object that lists the most."""
        self.matcher = YieldingMatcher(matcher)
        self.work = 0
        self._until = 0
        self._taken = 0
        """The number of tokens that the search has consumed and not rolled back."""
        self._classes = classes
        self._call = width // MEMBERS if width > NARROW else 1
        """The cost of a call for several tokens."""
        self._after_digit = width if width > NARROW else 1
        self._last: dict[int, int] = {}
        """The last byte of the text, by the number of tokens that the search has consumed."""
        self._allowed: bytes | None = None
        """The mask of the tokens that may come next at the row's position, one bit each."""
        self._begins: dict[int, dict[int, bool]] = {}
        """Whether each byte may come next, by the number of tokens that the search has consumed."""

    def allow(self, work: int) -> None:
        """Sets the cost that may be spent from now on; once it is spent, nothing fits."""
        self._until = self.work + work

    def spend(self, work: int) -> None:
        """Counts work that is no call of the matcher."""
        self.work += work

    @property
    def left(self) -> int:
        return max(0, self._until - self.work)

    @property
    def is_spent(self) -> bool:
        return self.work >= self._until

    def fitting(self, tokens: list[int]) -> int:
        """Returns how many of the tokens may come next, one after another."""
        if self.work >= self._until:
            return 0
        if self._allowed and not self._taken:
            first = bool(self._allowed[tokens[0] >> 3] >> (tokens[0] & 7) & 1)
            if len(tokens) == 1 or not first:
                return int(first)
        count = self.matcher.validate_tokens(tokens)
        least = self._after_digit if self.last_byte in DIGITS else 1
        self.work += (least if len(tokens) == 1 else max(least, self._call)) + count // 8
        return count

    def fits(self, tokens: list[int]) -> bool:
        return self.fitting(tokens) == len(tokens)

    @property
    def is_costly(self) -> bool:
        """Whether asking for one token costs much here."""
        return self._after_digit > NARROW and self.last_byte in DIGITS

    @property
    def last_byte(self) -> int:
        """The last byte of the text so far; 0 at the beginning."""
        return self._last.get(self._taken, 0)

    def see(self, mask: Mask) -> None:
        """Takes the mask at the row's position, which saves a call for each token."""
        self._allowed = mask.tobytes()

    def begins(self, byte: int) -> bool:
        """Whether a byte may come next. Control tokens and bytes without a token always may."""
        known = self._begins.get(self._taken)
        if known is None:
            known = self._begins[self._taken] = {}
        found = known.get(byte)
        if found is None:
            token = self._classes.printable.get(byte)
            if token is None or self.work >= self._until:
                return token is None
            found = known[byte] = self.fits([token])
        return found

    def excluded(self, some: Iterable[int]) -> AbstractSet[int]:
        """Returns the bytes of `some` that may not come next."""
        return frozenset(byte for byte in some if not self.begins(byte))

    def take(self, tokens: list[int]) -> bool:
        self.work += self._call + CONSUMED * len(tokens)
        self._taken += len(tokens)
        self._begins.pop(self._taken, None)
        self._follow(tokens[-1])
        return self.matcher.consume_tokens(tokens)

    def back(self, count: int) -> None:
        self._taken -= count
        self.matcher.rollback(count)

    def advance(self, token: int) -> None:
        """Consumes a token of the row, which is never rolled back."""
        self._taken, self._allowed, self._begins = 0, None, {}
        self._follow(token)
        self.matcher.consume_token(token)

    def forced(self) -> bytes:
        self.work += CONSUMED
        # compute_ff_bytes makes the matcher keep the bytes, so that it could not be rolled back
        # past them
        return self.matcher.deep_copy().compute_ff_bytes()

    @property
    def accepts(self) -> bool:
        return self.matcher.is_accepting()

    @property
    def failed(self) -> bool:
        return self.matcher.is_error()

    def _follow(self, token: int) -> None:
        texts = self._classes.texts
        self._last[self._taken] = next(reversed(texts[token]), 0) if token < len(texts) else 0
