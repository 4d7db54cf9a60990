"""The lengths of a prompt at which its recurrent states and sliding windows are kept.

They are the places where other prompts are expected to branch off, and some between them in long
prompts. At each place a piece of the prompt ends, which costs a forward pass.
"""

from collections.abc import Sequence

SPACING = 4096
"""Distance of the places in a long prompt, doubled until there are at most MOST_SPACED of them."""

MOST_SPACED = 8

NEAREST = 32
"""The least distance of two places: fewer tokens cost less to compute again than a forward pass."""


def snapshot_places(branches: Sequence[int], length: int) -> tuple[int, ...]:
    """Returns the places in a prompt of `length` tokens, in order.

    branches: the lengths at which other prompts are expected to differ from it. Of two near ones
    the shorter is kept, since it serves both.
    """
    spacing = SPACING
    while length // spacing > MOST_SPACED:
        spacing *= 2
    places: list[int] = []
    for place in (*sorted(branches), *range(spacing, length, spacing)):
        is_apart = all(abs(place - other) >= NEAREST for other in places)
        if NEAREST <= place < length and is_apart:
            places.append(place)
    return tuple(sorted(places))
