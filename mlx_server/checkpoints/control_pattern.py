"""A regular expression for where any of many texts is spelled, in time linear in what it reads.

Alternatives one after another would each be tried at every place: a vocabulary has thousands of
control tokens that begin alike. As a trie, no character is looked at twice.
"""

import re
from collections.abc import Iterable
from typing import Any

from mlx_server.errors import ModelUnusable

Trie = dict[str, Any]
END = ""
"""The key of a node where a text ends."""


def pattern_of(texts: Iterable[str], between: str = "") -> re.Pattern[str] | None:
    """Matches are empty, so that the next may begin inside of this one; group 1 is the longest text
    that begins there. `between` may stand behind each of its characters."""
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
    """The longest text is tried first: a node's own end comes behind all that follows it."""
    ways = [_chain(character, node, between) for character, node in trie.items() if character]
    found = ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"
    return f"(?:{found})?" if END in trie else found


def _chain(character: str, node: Trie, between: str) -> str:
    """Without a group for each of the characters that only one text has."""
    found = [re.escape(character) + between]
    while len(node) == 1 and END not in node:
        ((character, node),) = node.items()
        found.append(re.escape(character) + between)
    return "".join(found) + (_source(node, between) if node.keys() != {END} else "")
