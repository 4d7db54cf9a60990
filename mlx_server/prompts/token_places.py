"""Maps places in the text of a prompt to places in its tokens."""

from bisect import bisect_right
from collections.abc import Callable, Sequence


class TokenPlaces:
    """Finds how many tokens of a prompt stand for the first part of its text.

    Control tokens are the same in the text and in the tokens, so they align the two. Only the text
    after the nearest one is tokenised again.
    """

    def __init__(
        self,
        text: str,
        tokens: Sequence[int],
        control_ends: Sequence[int],
        control_places: Sequence[int],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """control_ends, control_places: where control tokens end in the text, and their places in
        the tokens. encode: tokenises a part of the marked text."""
        self._text = text
        self._tokens = tokens
        self._is_known = len(control_ends) == len(control_places)
        self._ends = [0, *control_ends]
        self._starts = [0, *(place + 1 for place in control_places)]
        self._encode = encode

    def before(self, end: int) -> int:
        """Returns the number of tokens of `text[:end]` that do not depend on what follows; 0 if
        unknown."""
        if not self._is_known:
            return 0
        nearest = bisect_right(self._ends, end) - 1
        part, start = self._text[self._ends[nearest] : end], self._starts[nearest]
        # the last token may depend on the next character
        return start + min(self._common(part, start), self._common(f"{part}x", start))

    def _common(self, part: str, start: int) -> int:
        ids = self._encode(part)
        rest = self._tokens[start : start + len(ids)]
        pairs = enumerate(zip(ids, rest, strict=False))
        return next((at for at, (a, b) in pairs if a != b), len(rest))
