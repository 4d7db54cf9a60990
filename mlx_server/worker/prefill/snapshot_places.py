"""The lengths of a prompt at which its recurrent states and sliding windows are kept.

They are the places where other prompts are expected to branch off, and some between them in long
prompts. At each place a piece of the prompt ends, which costs a forward pass.
"""

from collections.abc import Iterator, Sequence

FIRST = 1024
"""The first place in a long prompt. The next ones double until they are SPACING apart, so that a
prompt which parts early from another one computes at most half of what they share again."""

SPACING = 4096
"""Distance of the places in a long prompt, doubled until there are at most MOST_SPACED of them."""

MOST_SPACED = 8

NEAREST = 32
"""The least distance of two places: fewer tokens cost less to compute again than a forward pass."""


def snapshot_places(branches: Sequence[int], length: int) -> tuple[int, ...]:
    """Returns the places in a prompt of `length` tokens, in order.

    branches: the lengths at which other prompts are expected to differ from it.
    """
    spacing = SPACING
    while length // spacing > MOST_SPACED:
        spacing *= 2
    places: tuple[int, ...] = ()
    for place in (*sorted(branches), *_doubling(), *range(spacing, length, spacing)):
        if place < length:
            places = _with_place(places, place)
    return places


def with_parting(places: tuple[int, ...], parting: int, known: int) -> tuple[int, ...]:
    """Returns the places with the length at which the prompt parts from one in the prompt cache,
    and one a little before it.

    A third prompt is likely to part there too: from there on, the texts of clients vary. Ids and
    times have some tokens in common by chance, so it may part a few tokens earlier. known: how much
    the prompt cache can restore."""
    is_served = any(0 <= parting - place < NEAREST for place in places)
    if is_served or parting - known < NEAREST:
        return places
    left = tuple(p for p in places if abs(p - parting) >= NEAREST)
    return _with_place(_with_place(left, parting), parting - NEAREST)


def _doubling() -> Iterator[int]:
    place = FIRST
    while place < SPACING:
        yield place
        place *= 2


def _with_place(places: tuple[int, ...], place: int) -> tuple[int, ...]:
    """Adds a place. The shorter of two near places is kept, since it serves both: branches come in
    order."""
    is_apart = all(abs(place - other) >= NEAREST for other in places)
    return tuple(sorted((*places, place))) if place >= NEAREST and is_apart else places
