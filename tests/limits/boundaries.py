"""Cases at a limit and one past it."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from mlx_server import limits
from mlx_server.errors import ServerError
from tests.hostile.lowered import lower

Within = Callable[[int], bool]
"""Whether a quantity of this size passes unharmed."""

REFUSALS = (ServerError, ValidationError, ValueError)


@dataclass(frozen=True)
class Boundary:
    name: str
    within: Within
    lowered: int | None = None
    """The limit's value in this case, where its own would be slow to reach."""

    def __str__(self) -> str:
        return f"{self.name} {self.within.__name__}"

    def check(self, patched: pytest.MonkeyPatch) -> None:
        if self.lowered:
            lower(patched, self.name, self.lowered)
        most = getattr(limits, self.name).value
        assert self.within(most)
        assert not self.within(most + 1)


def passes(ask: Callable[[int], object]) -> Within:
    """Within as long as `ask` raises no refusal."""

    def within(size: int) -> bool:
        try:
            ask(size)
        except REFUSALS:
            return False
        return True

    within.__name__ = ask.__name__
    return within
