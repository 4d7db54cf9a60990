"""Text in a grammar that goes on to a mark, or to the end of the answer."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from mlx_server.grammars.lark import Lark
from mlx_server.tool_parsers.blocks import one_of


@dataclass(frozen=True)
class FreeTextRule:
    lark: Lark
    text: str
    """A terminal: what may be written in one go."""
    free: Sequence[int] = ()
    """Control tokens that mean nothing here."""
    ignored_delimiters: Sequence[str] = ()
    """Marks that mean nothing here, though the control token in them could."""
    first: str = field(default="", kw_only=True)
    """A terminal: what may come before the first of those, if it is less than `text`."""

    def starting_with(self, first: str) -> "FreeTextRule":
        return replace(self, first=first)

    def up_to(self, delimiter: str) -> str:
        return self._ended(lambda text: self.lark.up_to(delimiter, text))

    def rest(self) -> str:
        """To the end of the answer."""
        return self._ended(lambda text: text)

    def _ended(self, end: Callable[[str], str]) -> str:
        """end: goes on from a terminal."""
        steps = self._steps(self.text)
        run = self.lark.rule(f"({one_of(steps)})*") if steps else ""
        later = f"{run} {end(self.text)}"
        if not self.first:
            return later
        first = self._steps(self.first)
        longer = [f"({one_of(first)}) {later}"] if first else []
        return self.lark.rule(one_of([end(self.first), *longer]))

    def _steps(self, text: str) -> list[str]:
        """Ways to come to the next control token, and behind it."""
        free = [f"{text} <[{_ranges(self.free)}]>"] if self.free else []
        return free + [self.lark.up_to(mark, text) for mark in self.ignored_delimiters]


def _ranges(ids: Iterable[int]) -> str:
    pairs = enumerate(sorted(ids))
    runs = [[id for _, id in run] for _, run in groupby(pairs, lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" for run in runs)
