"""The tags that models of any family write reasoning in, whatever their template shows."""

import re
from collections.abc import Iterable

Pair = tuple[str, str]
"""An opening and a closing delimiter."""

THINK: Pair = ("<think>", "</think>")

NAMES = ("think", "thinking", "reasoning", "thought")

_TAG = re.compile(r"(?><[\w:-]+>)++")


def pair_of(name: str) -> Pair:
    """Returns the tags of this name, which may be given with its brackets."""
    bare = name.strip("<>[]|/ ")
    return f"<{bare}>", f"</{bare}>"


def pairs_of(names: Iterable[str]) -> tuple[Pair, ...]:
    return tuple(dict.fromkeys(map(pair_of, names)))


USUAL_TAGS = (*pairs_of(NAMES), ("◁think▷", "◁/think▷"))


def is_tag(opening: str) -> bool:
    """Whether an answer's text could mention this delimiter, as it is spelled like any other tag.

    Delimiters made of control tokens or in capitals open reasoning wherever they stand."""
    return bool(_TAG.fullmatch(opening.strip()))
