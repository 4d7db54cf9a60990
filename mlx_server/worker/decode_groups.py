"""The decoding rows of a model, in groups of similar lengths, each of which is a batch of mlx-lm's.

A step of the rows is a step of each group. `step_bytes.py` says which groups read the least.
"""

from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

from mlx_server.worker.phases import DecodeBatch
from mlx_server.worker.row import Row
from mlx_server.worker.step_bytes import StepBytes, cheapest_groups, padded_less, padding

WORTH = 0.25
"""Groups change if a step then reads less by this share of the weights: a change copies rows."""


class DecodeGroups:
    def __init__(self, reads: StepBytes, most_padding: int | None = None) -> None:
        """most_padding: the tokens by which the groups may be padded together."""
        self._reads = reads
        self._most_padding = most_padding
        self._groups: list[DecodeBatch] = []

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    def __contains__(self, number: int) -> bool:
        return any(number in group.uids for group in self._groups)

    @property
    def rows(self) -> list[Row]:
        return [row for group in self._groups for row in group.samplers]

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each group."""
        return [len(group) for group in self._groups]

    @property
    def caches(self) -> list[Any]:
        return [cache for group in self._groups for cache in group.prompt_cache]

    def place(self, number: int) -> tuple[DecodeBatch, int]:
        """Returns the group of a row, and the row's place in it."""
        group = next(group for group in self._groups if number in group.uids)
        return group, group.uids.index(number)

    def next(self) -> Iterator[tuple[Any, bool]]:
        """Yields mlx-lm's response for the next token of each row, and whether the row is alone in
        its group. Only a row that is alone frees its memory as soon as it finishes: any other group
        has to be copied without it."""
        rows = len(self)
        for group in list(self._groups):
            alone = len(group) == 1
            for response in group.next():
                yield response, alone
        if len(self) != rows:
            self._regroup()

    def extend(self, batch: DecodeBatch) -> None:
        self._groups.append(batch)
        self._regroup()

    def remove(self, number: int) -> None:
        group, place = self.place(number)
        group.filter([row for row in range(len(group)) if row != place])
        self._regroup()

    def part(self, number: int) -> DecodeBatch:
        """Removes one row and returns it as a batch, with its cache."""
        (one,) = self.parts({number})
        return one

    def parts(self, numbers: Collection[int]) -> list[DecodeBatch]:
        """Removes rows and returns each as a batch, with its cache."""
        parts: list[DecodeBatch] = []
        for group in list(self._groups):
            places = [at for at, number in enumerate(group.uids) if number in numbers]
            if len(places) == len(group) == 1:
                self._groups.remove(group)
                parts.append(group)
            elif places:
                parts += group.parts(places)
        self._regroup()
        return parts

    def part_without_cache(self, number: int) -> DecodeBatch:
        group, place = self.place(number)
        one = group.part_without_cache(place)
        self._regroup()
        return one

    def _regroup(self) -> None:
        """Regroups the rows after some have come or left, if a step then reads enough less, or if
        the padding exceeds the memory that is reserved for it."""
        self._groups = [group for group in self._groups if group]
        token = max((self._reads.token(group.prompt_cache) for group in self._groups), default=0.0)
        numbers = [number for group in self._groups for number in group.uids]
        lengths = [len(tokens) for group in self._groups for tokens in group.tokens]

        def read(rows: int, longest: int) -> float:
            return self._reads.weights(rows) + rows * longest * token

        def read_by(groups: list[list[int]]) -> float:
            return sum(read(len(group), max(group)) for group in groups)

        now = [[len(tokens) for tokens in group.tokens] for group in self._groups]
        groups = padded_less(cheapest_groups(lengths, read)[1], lengths, self._most_padding)
        saved = read_by(now) - read_by([[lengths[row] for row in rows] for rows in groups])
        if saved > WORTH * self._reads.weights(1) or self._is_padded_too_much(now):
            self._change([{numbers[row] for row in rows} for rows in groups])

    def _is_padded_too_much(self, lengths: list[list[int]]) -> bool:
        most = self._most_padding
        return most is not None and sum(map(padding, lengths)) > most

    def _change(self, wanted: list[set[int]]) -> None:
        parts = list(chain.from_iterable(_split(group, wanted) for group in self._groups))
        self._groups = []
        for numbers in wanted:
            largest, *others = sorted(
                (part for part in parts if part.uids[0] in numbers), key=_padded, reverse=True
            )
            for other in others:
                largest.extend(other)
            self._groups.append(largest)


def _split(group: DecodeBatch, wanted: list[set[int]]) -> Iterator[DecodeBatch]:
    """Yields the rows of a group that belong together from now on. Those that take the most memory
    stay where they are, the others are copied."""
    while len(found := [numbers for numbers in wanted if not numbers.isdisjoint(group.uids)]) > 1:
        least = min(found, key=lambda numbers: _padded_of(group, numbers))
        yield group.part([at for at, number in enumerate(group.uids) if number in least])
    yield group


def _padded(group: DecodeBatch) -> int:
    return _padded_of(group, set(group.uids))


def _padded_of(group: DecodeBatch, numbers: set[int]) -> int:
    """Returns the tokens that some rows of a group take, padding included."""
    rows = zip(group.uids, group.tokens, strict=True)
    lengths = [len(tokens) for number, tokens in rows if number in numbers]
    return len(lengths) * max(lengths)
