"""Text is never control.

Whatever a client wrote, in a message, a tool's name or a schema, is marked before the template
sees it, and the prompt is cut wherever a control token is spelled across a mark. So a control
token can only come from the template's own text.
"""

import re
from itertools import accumulate, pairwise
from typing import Any

from mlx_server.errors import BadRequest
from mlx_server.families.checkpoint import Checkpoint
from mlx_server.messages import Conversation

DEEPEST = 64
"""Levels of objects and lists, as in a request's body."""


class Seal:
    """Marks what a client wrote, and cuts the prompt where a control token is spelled with it.

    A template may join, trim, replace or change the case of what it is given, so no text is known
    to be harmless before it ran. So a mark follows each character that could be the edge of a
    control token, wherever it stands. Marks that no control token spans leave no trace.
    """

    # Noncharacters: legal in a string, and never assigned to anything.
    CANDIDATES = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))

    def __init__(self, checkpoint: Checkpoint, conversation: Conversation) -> None:
        self._tokenizer = checkpoint.tokenizer
        self._mark = self._unused(repr(conversation).lower())
        # `tojson` with ensure_ascii and the repr of a list write the mark as an escape
        self._marks = re.compile(f"{self._mark}|{re.escape(_escape(self._mark))}")

    def _unused(self, text: str) -> str:
        # repr escapes noncharacters, so one that the client wrote shows as its escape, and so
        # does one that is escaped in the JSON of arguments
        free = (c for c in self.CANDIDATES if _escape(c) not in text)
        mark = next(free, None)
        if mark is None:
            raise BadRequest("The messages use every noncharacter from U+FDD0 to U+FDEF.")
        return mark

    def closed(self, value: Any, depth: int = DEEPEST) -> Any:
        if not depth:  # the arguments of an earlier call: JSON inside of JSON
            raise BadRequest(f"The messages nest deeper than {DEEPEST}.", param="messages")
        match value:
            case str():
                return self._closed(value)
            case list() | tuple():
                return [self.closed(item, depth - 1) for item in value]
            case dict():
                return {self._closed(key): self.closed(v, depth - 1) for key, v in value.items()}
        return value

    def _closed(self, text: str) -> str:
        places = sorted(self._tokenizer.risky(text))
        return self._mark.join(text[a:b] for a, b in pairwise([0, *places, len(text)]))

    def tokens(self, rendered: str) -> list[int]:
        pieces = self._marks.split(rendered)
        text = "".join(pieces)
        marked = set(accumulate(map(len, pieces[:-1])))
        spelled = (range(a + 1, b + 1) for a, b in self._tokenizer.spelled(text))
        behind = {place for places in spelled for place in places if place in marked}
        cuts = sorted(behind | {place - 1 for place in behind})
        encode, as_text = self._tokenizer.encode_as_spelled, self._tokenizer.as_text
        return [
            token
            for a, b in pairwise([0, *cuts, len(text)])
            for token in (as_text if b in behind and b - a == 1 else encode)(text[a:b])
        ]


def _escape(character: str) -> str:
    return repr(character)[1:-1]
