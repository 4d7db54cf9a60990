"""Grammar rules of free text, which goes on to a delimiter or to the end of the answer."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from mlx_server.grammars.lark import Lark
from mlx_server.tool_parsers.blocks import one_of


@dataclass(frozen=True)
class FreeTextRule:
    lark: Lark
    text: str
    """A terminal: the text allowed between control tokens."""
    free: Sequence[int] = ()
    """Ids of the control tokens that are allowed in the text."""
    ignored_delimiters: Sequence[str] = ()
    """Delimiters that are allowed in the text, although their control token alone is not."""
    first: str = field(default="", kw_only=True)
    """A terminal: the text allowed before the first of these control tokens and delimiters, if it
    is restricted further."""
    first_before_control: str = field(default="", kw_only=True)
    """A terminal: the same, for text after which such a control token or delimiter follows."""

    def starting_with(self, first: str, before_control: str = "") -> "FreeTextRule":
        return replace(self, first=first, first_before_control=before_control or first)

    def up_to(self, delimiter: str) -> str:
        return self._ended(lambda text: self.lark.up_to(delimiter, text))

    def rest(self) -> str:
        """Returns the rule of free text to the end of the answer."""
        return self._ended(lambda text: text)

    def _ended(self, end: Callable[[str], str]) -> str:
        """Returns the rule of free text; `end` makes its last part from a terminal."""
        steps = self._steps(self.text)
        run = self.lark.rule(f"({one_of(steps)})*") if steps else ""
        later = f"{run} {end(self.text)}"
        if not self.first:
            return later
        first = self._steps(self.first_before_control)
        longer = [f"({one_of(first)}) {later}"] if first else []
        return self.lark.rule(one_of([end(self.first), *longer]))

    def _steps(self, text: str) -> list[str]:
        """Returns alternatives for text up to and including the next control token."""
        free = [f"{text} <[{_ranges(self.free)}]>"] if self.free else []
        return free + [self.lark.up_to(ignored, text) for ignored in self.ignored_delimiters]


def _ranges(ids: Iterable[int]) -> str:
    pairs = enumerate(sorted(ids))
    runs = [[id for _, id in run] for _, run in groupby(pairs, lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" for run in runs)
