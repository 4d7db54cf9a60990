"""Marks the characters of a text that could make it part of a control token."""

import re
from collections.abc import Collection

from mlx_server.checkpoints.control_pattern import pattern_of

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
