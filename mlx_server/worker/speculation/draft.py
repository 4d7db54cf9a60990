"""Tokens that may come next in a row, and those who find them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol


class Kind(NamedTuple):
    """What is known of a drafted token before it is compared: tokens of the same kind are right
    about equally often."""

    source: str
    match: int
    """How many tokens before it agree with the source."""


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next; which tokens come does not depend on it."""

    tokens: list[int]
    source: str
    match: int
    """How many of the row's last tokens agree with the place where the draft was found."""
    kinds: list[Kind] = field(default_factory=list)
    """The kind of each token, if not all are from one source."""
    chances: list[float] = field(default_factory=list)
    """For each token, how likely it and all before it are right."""
    pace: float = 1.0
    """The tokens that the row lately got of a pass."""

    def kind(self, at: int) -> Kind:
        """Returns the kind of a token, given that all before it are right."""
        return self.kinds[at] if self.kinds else Kind(self.source, self.match + at)

    def cut(self, length: int) -> "Draft | None":
        """Returns the first tokens of the draft."""
        if length <= 0:
            return None
        kinds, chances = self.kinds[:length], self.chances[:length]
        return replace(self, tokens=self.tokens[:length], kinds=kinds, chances=chances)


class Drafter(Protocol):
    """Drafts for one row."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Reads tokens that were appended to the row."""

    def draft(self, most: int) -> Draft | None:
        """Returns at most so many tokens that may come next. It may be called again."""
