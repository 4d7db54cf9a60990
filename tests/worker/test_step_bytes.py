"""The groups of rows for which a step reads the least."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.worker.decode_groups import cheapest_groups, padded_less, padding

pytestmark = pytest.mark.tables


def every_grouping(rows: list[int]) -> Iterator[list[list[int]]]:
    if not rows:
        yield []
        return
    first, *others = rows
    for groups in every_grouping(others):
        yield [[first], *groups]
        for at, group in enumerate(groups):
            yield [*groups[:at], [first, *group], *groups[at + 1 :]]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    weights=st.integers(0, 60),
    experts=st.integers(0, 60),
)
def test_no_groups_read_less(lengths: list[int], weights: int, experts: int) -> None:
    def read(rows: int, longest: int) -> float:
        return weights + experts * (1 - 0.5**rows) + rows * longest

    def all_read(groups: list[list[int]]) -> float:
        return sum(read(len(group), max(lengths[row] for row in group)) for group in groups)

    least, found = cheapest_groups(lengths, read)
    rows = list(range(len(lengths)))
    assert sorted(row for group in found for row in group) == rows
    assert least == pytest.approx(all_read(found))
    assert least <= min(map(all_read, every_grouping(rows))) + 1e-9


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    weights=st.integers(0, 60),
    most=st.integers(0, 60),
)
def test_groups_are_split_until_the_padding_is_small(
    lengths: list[int], weights: int, most: int
) -> None:
    groups = cheapest_groups(lengths, lambda rows, longest: weights + rows * longest)[1]
    found = padded_less(groups, lengths, most)
    assert sorted(row for group in found for row in group) == list(range(len(lengths)))
    padded = sum(padding([lengths[row] for row in group]) for group in found)
    assert padded <= most
    assert found == groups or sum(padding([lengths[row] for row in g]) for g in groups) > most
