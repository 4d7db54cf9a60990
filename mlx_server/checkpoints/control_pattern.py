"""A regular expression that finds any of many texts in linear time.

A plain alternation would try each text at every position, and a vocabulary has thousands of control
tokens with a common prefix. As a trie, the expression reads no character twice.
"""

import re
from collections.abc import Iterable
from typing import Any

from mlx_server.errors import ModelUnusable

Trie = dict[str, Any]
END = ""
"""The key of a node where a text ends."""


def pattern_of(texts: Iterable[str], between: str = "") -> re.Pattern[str] | None:
    """Matches are empty, so that they may overlap; group 1 is the longest text that begins at the
    match. The expression `between` may match after each of its characters."""
    trie: Trie = {}
    for text in filter(None, texts):
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[END] = {}
    if not trie:
        return None
    first = "".join(map(re.escape, trie))
    try:
        return re.compile(f"(?=[{first}])(?=({_source(trie, between)}))")
    except RecursionError:
        raise ModelUnusable(
            "The control tokens of tokenizer.json are nested too deeply. Download the model again."
        ) from None


def _source(trie: Trie, between: str) -> str:
    """The expression of a node. Its own end is tried last, so that the longest text matches."""
    options = [_chain(character, node, between) for character, node in trie.items() if character]
    found = options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"
    return f"(?:{found})?" if END in trie else found


def _chain(character: str, node: Trie, between: str) -> str:
    """The expression from a character on. Characters without alternatives need no groups."""
    found = [re.escape(character) + between]
    while len(node) == 1 and END not in node:
        ((character, node),) = node.items()
        found.append(re.escape(character) + between)
    return "".join(found) + (_source(node, between) if node.keys() != {END} else "")
