"""The files that follow one block of a prompt, in order of use: prompts differ after a common
beginning, so there may be thousands, and a lookup must not ask each of them."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

from mlx_server.prompt_files.names import Ids, PromptFile, common_length

RECENT = 16
"""The number of files that are compared with a prompt that continues none of them: the latest ones
used."""


class NextFiles:
    def __init__(self, block_end: int) -> None:
        """block_end: the number of tokens up to the block's end."""
        self._block_end = block_end
        self._tails: dict[PromptFile, Ids | None] = {}
        """The tokens of each file after the block, if they are known: a name has their digest only.
        The last one was used last."""
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._tails)

    def add(self, file: PromptFile) -> None:
        self._tails[file] = None
        self._lengths[file.length] += 1

    def remove(self, file: PromptFile) -> None:
        del self._tails[file]
        self._lengths[file.length] -= 1
        if not self._lengths[file.length]:
            del self._lengths[file.length]

    def used(self, file: PromptFile) -> None:
        """Notes that a file was used just now."""
        self._tails[file] = self._tails.pop(file)

    def learn(self, file: PromptFile, tail: Ids) -> None:
        """Notes the tokens of a file after the block."""
        if file in self._tails:
            self._tails[file] = tail

    def states(self, most: int, state_of: Callable[[int], PromptFile]) -> Iterator[PromptFile]:
        """The states of a prompt's beginnings, the longest first. most: the prompt's length.
        state_of: the name of the state after so many tokens of the prompt."""
        for length in sorted(self._lengths, reverse=True):
            if length <= most and (file := state_of(length)) in self._tails:
                yield file

    def with_most(self, rest: Ids) -> tuple[PromptFile | None, int]:
        """The file that has most tokens of `rest`, which follow the block, and how many.

        Only the last used one may be read to find out: else each new prompt would read a file."""
        best, most = None, 0
        for at, (file, tail) in enumerate(islice(reversed(self._tails.items()), RECENT)):
            common = 0
            if tail is not None:
                common = common_length(tail, rest)
            elif at == 0:
                common = min(len(rest), file.length - self._block_end)
            if common > most:
                best, most = file, common
        return best, most
