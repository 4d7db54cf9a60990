"""The texts that may continue or end an instance of a schema, wherever in it one stands.

An object whose required member `size` is an `enum` of "S" and "XL" gives the values `"S"` and
`"XL"`, the member `"size":"S"`, the required member `,"size":"S"` that may come after another one,
and tails such as `L"`, `XL"` and `ize":`. They are proposals, to be checked by a matcher.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from mlx_server.schemas.bounds import NUMERIC
from mlx_server.schemas.shortest import ShortestInstances, compact, constants_of, patterns_of

MOST_TEXTS = 1_500
"""The most texts of a kind."""
MOST_SUFFIXES = 64
"""The most suffixes of one literal that are proposed."""

_NUMERIC = frozenset(NUMERIC)
_DIGITS = ".0123456789"
_ADDING = _NUMERIC.union(("pattern", "format", "const", "enum"))
"""The keywords that say what a text or a number may end with."""


class InstanceTexts:
    """The texts of all the schemas that were added."""

    def __init__(self, values: Iterable[str]) -> None:
        """values: JSON values that may stand where any value is allowed."""
        self.values = set(values)
        self.members: set[str] = set()
        self.required: set[str] = set()
        """A comma with a required member after it."""
        self.following: set[str] = set()
        """A comma with another member or an item after it."""
        self.tails: set[str] = {'"', '":', '":0'}
        """The ends of a pattern's text, a name or a constant, with the closing quote."""
        self.longest_tail = ""
        """The longest end of a text that a pattern may require."""
        self.width = 0
        """The number of members of the object that lists the most."""
        self.numbers = {"0" * n for n in range(1, 18)} | {".0", "e0", "1"}
        """Digits that may complete a number."""

    def add(self, schema: Any) -> str | None:
        """Returns the schema's shortest instance; None if none was found.

        What can't be read of a schema is left out, as these are proposals only.
        """
        with suppress(ArithmeticError, AttributeError, RecursionError, TypeError, ValueError):
            return self._add_all(schema)
        return None

    def _add_all(self, schema: Any) -> str | None:
        instances = ShortestInstances(schema)
        listed = (one.get("properties") for one in instances.schemas)
        self.width = max(self.width, *(len(one) for one in listed if isinstance(one, dict)), 0)
        for one in instances.schemas:
            if (instance := instances.text(one)) is not None:
                self.values.add(instance)
                self.following.add(f",{instance}")
            if not _ADDING.isdisjoint(one):
                self._add_own(one)
        required = instances.required()
        names = dict[str, str]()
        for name, value in dict.fromkeys(instances.members()):
            if (written := names.get(name)) is None:
                written = names[name] = compact(name)
                self.tails |= {f"{end}:" for end in _suffixes(written)}
            if value is not None:
                self.tails.add(f'":{value}')
                self.members.add(f"{written}:{value}")
                following = self.required if name in required else self.following
                following.add(f",{written}:{value}")
        return instances.text(schema)

    def _add_own(self, schema: Mapping[str, Any]) -> None:
        for tails in patterns_of(schema):
            ends = {compact(tail)[1:] for tail in tails.tails}
            self.tails |= ends
            self.longest_tail = max(self.longest_tail, *ends, key=lambda text: (len(text), text))
        for constant in map(compact, islice(constants_of(schema) or (), MOST_TEXTS)):
            self.tails.update(_suffixes(constant))
            self.values.add(constant)
        for number in _bounds(schema):
            self.numbers |= {end for end in _suffixes(f"{number}") if end[0] in _DIGITS}


def _bounds(schema: Mapping[str, Any]) -> Iterable[int | float]:
    """Returns the schema's bounds, and the integers next to them."""
    for key in _NUMERIC.intersection(schema):
        bound = schema[key]
        if isinstance(bound, int) and not isinstance(bound, bool):
            yield from (bound, bound + 1, bound - 1)
        elif isinstance(bound, float):
            yield bound


def _suffixes(text: str) -> list[str]:
    return [text[at:] for at in range(1, min(len(text), MOST_SUFFIXES))]
