"""Which tokens are control tokens, and how ordinary text is kept from becoming one.

The server and the engine process share these facts.
"""

import re
from collections.abc import Collection, Container, Iterable
from functools import lru_cache
from typing import Any

from mlx_server.errors import ModelUnusable


def is_control(content: str, special: bool) -> bool:
    """Whether an added token is a control token, which ordinary text never becomes."""
    return bool(content) and (special or _looks_like_markup(content))


def is_letter(content: str, vocabulary: Container[str]) -> bool:
    """Whether an added token is a single character of the vocabulary: text, although some files
    name one, such as `!`, as the special token for padding."""
    return len(content) == 1 and content in vocabulary


def _looks_like_markup(token: str) -> bool:
    return len(token) > 2 and token[0] in "<[" and token[-1] in ">]"


@lru_cache(maxsize=1)
def bytes_to_unicode() -> dict[str, int]:
    """GPT-2's characters for bytes, mapped to the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


Trie = dict[str, Any]
END = ""
"""The key of a node where a text ends."""


def pattern_of(texts: Iterable[str], between: str = "") -> re.Pattern[str] | None:
    """Returns an expression that finds any of many texts in linear time.

    Matches are empty, so that they may overlap; group 1 is the longest text that begins at the
    match. The expression `between` may match after each of its characters.

    A plain alternation would try each text at every position, and a vocabulary has thousands of
    control tokens with a common prefix. As a trie, the expression reads no character twice.
    """
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


WINDOW = 1 << 16
"""Characters of a long text that are searched at a time."""


class ControlTokenEscape:
    def __init__(self, control_tokens: Collection[str]) -> None:
        edges = {edge for token in control_tokens for edge in (token[0], token[-1])}
        self._edges = sorted(edge for edge in edges if _is_symbol(edge))
        """The symbols with which a control token begins or ends."""
        wordy = pattern_of(token for token in control_tokens if not _is_symbol(token[0]))
        self._wordy = wordy and re.compile(f"{wordy.pattern}.", re.DOTALL)
        """Matches the first character of control tokens that do not begin with a symbol."""
        self._cores = frozenset(map(_letters, control_tokens)) - {""}
        self._longest = max(map(len, control_tokens), default=0)

    def __call__(self, text: str, mark: str) -> str:
        has_core = self._cores and _letters_are_among(text, self._cores)
        if self._wordy:
            text = _marked(text, self._wordy, mark, self._longest)
        for edge in self._edges:
            if edge in text:
                text = text.replace(edge, edge + mark)
        # the template may add the edges around it
        return f"{text[0]}{mark}{text[1:]}" if has_core else text


def _is_symbol(character: str) -> bool:
    return not character.isalnum() and not character.isspace()


def _marked(text: str, first: re.Pattern[str], mark: str, longest: int) -> str:
    """Add the mark after each match, in windows. They overlap by the longest token, so that tokens
    across their border are found, and the overlap is cut off again."""
    parts, marked = [], rf"\g<0>{mark}"
    for begin in range(0, len(text), WINDOW):
        end = begin + WINDOW
        part = first.sub(marked, text[begin : end + longest])
        parts.append(part[: len(part) - len(first.sub(marked, text[end : end + longest]))])
    return "".join(parts)


def _letters_are_among(text: str, few: frozenset[str]) -> bool:
    found, longest = "", max(map(len, few))
    for begin in range(0, len(text), WINDOW):
        found += _letters(text[begin : begin + WINDOW])
        if len(found) > longest:
            return False
    return found in few


def _letters(text: str) -> str:
    """The letters and digits of a text, which a template's edits do not change."""
    return re.sub(r"[\W_]+", "", text.casefold())
