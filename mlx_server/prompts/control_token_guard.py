"""Text is never control.

Whatever a client wrote, in a message, a tool's name or a schema, is marked before the template
sees it, and the prompt is cut wherever a control token is spelled across a mark. So a control
token can only come from the template's own text.

A prompt may have tens of millions of marks, so nothing is kept for each of them, and long texts are
searched in pieces: `re` lets no other thread run while it searches.
"""

import re
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from mlx_server import limits
from mlx_server.checkpoints.checkpoint import Checkpoint
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation
from mlx_server.prompts.text_size import texts_of
from mlx_server.request_threads import check_wanted

WINDOW = 1 << 16
"""Characters that are searched at once."""


class ControlTokenGuard:
    """Marks what a client wrote, and cuts the prompt where a control token is spelled with it.

    A template may join, trim, replace or change the case of what it is given, so no text is known
    to be harmless before it ran. So a mark follows each character that could be the edge of a
    control token, wherever it stands. Marks that no control token spans leave no trace.
    """

    # Control characters that nobody uses, and noncharacters. The former do not make a text wider in
    # memory; U+0085 is white space, which templates trim.
    CANDIDATES = tuple(
        chr(code) for code in (*range(0x80, 0x85), *range(0x86, 0xA0), *range(0xFDD0, 0xFDF0))
    )

    def __init__(self, checkpoint: Checkpoint, conversation: Conversation) -> None:
        self._tokenizer = checkpoint.tokenizer
        self._mark = unused_character(self.CANDIDATES, texts_of(conversation))
        self._forms = (self._mark, *escapes(self._mark))
        either = "|".join(map(re.escape, self._forms))
        self._marks = re.compile(f"(?:{either})+")
        self._spelled = self._tokenizer.control_with(f"(?:{either})*")

    def escaped(self, value: Any, depth: int = limits.JSON_DEPTH.value) -> Any:
        if not depth:  # the arguments of an earlier call: JSON inside of JSON
            raise BadRequest(
                f"The messages nest deeper than {limits.JSON_DEPTH.value}.", param="messages"
            )
        match value:
            case str():
                return self._tokenizer.with_delimiters(value, self._mark)
            case list() | tuple():
                return [self.escaped(item, depth - 1) for item in value]
            case dict():
                return {self.escaped(k): self.escaped(v, depth - 1) for k, v in value.items()}
        return value

    def tokens(self, rendered: str, most: int | None = None) -> list[int]:
        """most: beyond which a prompt is refused as too long, before the rest is tokenised."""
        found = array("I")
        for text, is_clients in self._pieces(rendered):
            check_wanted()
            if is_clients:
                found.extend(self._tokenizer.as_text(text))
            else:
                found += self._tokenizer.encode_within(text, most, len(found))
        return found.tolist()

    def _pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """The prompt without its marks; with each, whether it is one character of a client's that
        would be a part of a control token."""
        at = 0
        for start, end in self._spellings(rendered):
            for run in self._marks.finditer(rendered, max(at, start), max(at, end)):
                place = run.start() - 1
                if place > at:
                    yield self._unmarked(rendered[at:place]), False
                yield rendered[place], True
                at = run.end()
        if at < len(rendered):
            yield self._unmarked(rendered[at:]), False

    def _spellings(self, rendered: str) -> Iterator[tuple[int, int]]:
        """Of every control token, marks inside and behind it included."""
        if self._spelled is None:
            return
        longest = self._tokenizer.longest_control * (1 + 4 * max(map(len, self._forms)))
        for begin in range(0, len(rendered), WINDOW):
            check_wanted()
            for match in self._spelled.finditer(rendered, begin, begin + WINDOW + longest):
                if match.start() >= begin + WINDOW:
                    break
                yield match.span(1)

    def _unmarked(self, text: str) -> str:
        for form in self._forms:
            text = text.replace(form, "")
        return text


def unused_character(candidates: Iterable[str], texts: Iterable[str]) -> str:
    """A character that none of the texts has, written out or escaped."""
    texts = list(texts)
    escaped = [text.lower() for text in texts if "\\" in text]
    for mark in candidates:
        written = any(mark in text for text in texts)
        if not written and not any(form in text for text in escaped for form in escapes(mark)):
            return mark
    raise BadRequest("The messages use every noncharacter, and every control character.")


def escapes(mark: str) -> tuple[str, ...]:
    """As `tojson` with ensure_ascii and the repr of a list write it."""
    return tuple(dict.fromkeys((f"\\u{ord(mark):04x}", repr(mark)[1:-1])))
