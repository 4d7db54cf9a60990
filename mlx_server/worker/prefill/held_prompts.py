"""The cached prompts that rows are about to continue.

Memory is reserved for a row before it begins, and the prompt cache gives way to it. A row that
holds a prompt finds it all the same: what the cache has dropped takes the row's own memory until
the row begins, and of such a prompt only the part is kept that rows continue.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mlx_server.worker.prefill.cached_prompt import CachedPrompt, Snapshot


@dataclass(frozen=True)
class Hold:
    prompt: CachedPrompt
    length: int
    """How many of the prompt's tokens the row continues."""
    snapshot: Snapshot


class HeldPrompts:
    def __init__(self) -> None:
        self._holds: dict[int, Hold | None] = {}
        """The hold of each row that waits, by its number."""

    def begin(self, row: int, hold: Hold | None) -> None:
        """hold: None if nothing of the row's prompt is known yet."""
        self._holds[row] = hold

    def replace(self, row: int, hold: Hold) -> None:
        """Gives a row a better prompt, unless the row no longer waits."""
        if row in self._holds:
            self._holds[row] = hold

    def release(self, row: int) -> None:
        self._holds.pop(row, None)

    def forget(self, key: str, within: str) -> None:
        """Drops the prompts of this key, and of keys that begin with `within`."""
        for row, hold in self._holds.items():
            if hold and (hold.prompt.key == key or hold.prompt.key.startswith(within)):
                self._holds[row] = None

    def clear(self) -> None:
        self._holds.clear()

    def with_key(self, key: str) -> Iterator[CachedPrompt]:
        return (each.prompt for each in self._holds.values() if each and each.prompt.key == key)

    def length(self, prompt: CachedPrompt) -> int:
        """Returns how many of the prompt's tokens rows continue."""
        return max((hold.length for hold in self._holds_of(prompt)), default=0)

    def dropped(self, prompt: CachedPrompt) -> None:
        """Frees what no row continues of a prompt that the cache has dropped."""
        if holds := self._holds_of(prompt):
            prompt.cut_back(self.length(prompt), [hold.snapshot for hold in holds])

    def superseded(self, prompt: CachedPrompt, by: CachedPrompt) -> None:
        """Has rows continue `by`, which begins with all of the prompt, in its place."""
        for row, hold in self._holds.items():
            if hold and hold.prompt is prompt:
                self._holds[row] = replace(hold, prompt=by)

    def _holds_of(self, prompt: CachedPrompt) -> list[Hold]:
        return [hold for hold in self._holds.values() if hold and hold.prompt is prompt]
