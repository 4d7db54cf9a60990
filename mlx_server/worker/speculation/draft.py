"""What may come next in a row, for free: a draft and those who make drafts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

MOST_DRAFTED = 31
"""The most tokens of a draft: a pass of 32 positions is the last one that costs no more than one of
10 by MLX's kernels."""


class Kind(NamedTuple):
    """What is known of a drafted token before it is compared: tokens of the same kind are right
    about equally often."""

    source: str
    match: int
    """How many tokens before it agree with the source."""


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next; it never changes which tokens come."""

    tokens: list[int]
    source: str
    match: int
    """How many of the row's last tokens agree with the place where the draft was found."""
    kinds: list[Kind] = field(default_factory=list)
    """The kind of each token, if not all are from one source."""

    def kind(self, at: int) -> Kind:
        """Returns the kind of the draft's token `at`, given that all before it were right."""
        return self.kinds[at] if self.kinds else Kind(self.source, self.match + at)


class Drafter(Protocol):
    """Drafts for one row."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Reads tokens that were appended to the row."""

    def draft(self, most: int) -> Draft | None:
        """Returns at most so many tokens that may come next."""
