"""Keeps a client's text from becoming control tokens.

All text of a client, in a message, a tool's name or a schema, is marked before the template sees
it, and the prompt is cut wherever the text of a control token contains a mark. So a control token
can only come from the template's own text.

A prompt may have tens of millions of marks, so nothing is stored per mark, and long texts are
searched in windows: `re` lets no other thread run while it searches.
"""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from mlx_server import limits
from mlx_server.errors import BadRequest
from mlx_server.messages import Conversation, Message, texts_of
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.request_threads import check_wanted


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Returns the number of characters or tokens with which both begin."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    # slices are compared at the speed of the memory, characters one by one are not
    return bisect_left(range(shorter), True, key=lambda i: a[: i + 1] != b[: i + 1])


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
        return common_length(ids, self._tokens[start : start + len(ids)])


WINDOW = 1 << 16
"""Characters per search."""


class ControlTokenGuard:
    """Marks a client's text, and cuts the prompt where it would be part of a control token.

    A template may join, trim, replace or change the case of its input, so no text is known to be
    harmless before the template ran. A mark therefore follows every character that could be the
    edge of a control token. Marks outside of control tokens are removed without effect.
    """

    # Unused control characters, and noncharacters. The former do not make a string wider in
    # memory; U+0085 is left out because it is white space, which templates trim.
    CANDIDATES = tuple(
        chr(code) for code in (*range(0x80, 0x85), *range(0x86, 0xA0), *range(0xFDD0, 0xFDF0))
    )

    def __init__(self, checkpoint: Checkpoint, conversation: Conversation) -> None:
        self._tokenizer = checkpoint.tokenizer
        self._conversation = conversation
        self._mark = unused_character(self.CANDIDATES, texts_of(conversation))
        self._forms = (self._mark, *escapes(self._mark))
        either = "|".join(map(re.escape, self._forms))
        self._marks = re.compile(f"(?>{either})++")
        self._marked_control = self._tokenizer.control_with(f"(?:{either})*")

    @cached_property
    def end_mark(self) -> str:
        """Another unused character, for a renderer that looks for the end of a text."""
        others = (mark for mark in self.CANDIDATES if mark != self._mark)
        return unused_character(others, texts_of(self._conversation))

    def escaped(self, value: Any, depth: int = limits.JSON_DEPTH) -> Any:
        if not depth:  # the arguments of an earlier call are JSON within JSON
            raise BadRequest(
                f"JSON in `messages` is nested deeper than {limits.JSON_DEPTH} levels.",
                param="messages",
            )
        match value:
            case str():
                return self._tokenizer.escaped(value, self._mark)
            case list() | tuple():
                return [self.escaped(item, depth - 1) for item in value]
            case dict():
                return {self.escaped(k): self.escaped(v, depth - 1) for k, v in value.items()}
        return value

    def tokens(self, rendered: str, most: int | None = None) -> list[int]:
        """Tokenise; a prompt of more than `most` tokens is refused before the rest is tokenised."""
        ids = array("I")
        for text, is_clients in self._pieces(rendered):
            check_wanted()
            if is_clients:
                ids.extend(self._tokenizer.as_text(text))
            else:
                ids += self._tokenizer.encode_within(text, most, len(ids))
        return ids.tolist()

    def token_places(self, rendered: str, tokens: Sequence[int]) -> TokenPlaces:
        """Finds places of the marked text in its tokens."""
        own = [
            end
            for start, end in self._spellings(rendered)
            if not self._marks.search(rendered, start, end)
        ]
        control = self._tokenizer.control_tokens
        places = [place for place, token in enumerate(tokens) if token in control]
        return TokenPlaces(rendered, tokens, own, places, self.tokens)

    def _pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Yields the prompt without its marks, in pieces. A flag marks the pieces that are one
        character of a client's text which would be part of a control token."""
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
        """Yields start and end of every control token, including marks within and after it."""
        if self._marked_control is None:
            return
        longest = self._tokenizer.longest_control * (1 + 4 * max(map(len, self._forms)))
        for begin in range(0, len(rendered), WINDOW):
            check_wanted()
            for match in self._marked_control.finditer(rendered, begin, begin + WINDOW + longest):
                if match.start() >= begin + WINDOW:
                    break
                yield match.span(1)

    def _unmarked(self, text: str) -> str:
        for form in self._forms:
            text = text.replace(form, "")
        return text


def text_tokens(checkpoint: Checkpoint, text: str, most: int | None = None) -> list[int]:
    """Returns the tokens of a client's text by itself. Raises ContextTooLong early if they are over
    `most`."""
    guard = ControlTokenGuard(checkpoint, Conversation((Message("assistant", text),)))
    return guard.tokens(guard.escaped(text), most)


def unused_character(candidates: Iterable[str], texts: Iterable[str]) -> str:
    """Returns a character that none of the texts contains, literally or escaped."""
    texts = list(texts)
    escaped = [text.lower() for text in texts if "\\" in text]
    for mark in candidates:
        is_used = any(mark in text for text in texts)
        if not is_used and not any(form in text for text in escaped for form in escapes(mark)):
            return mark
    raise BadRequest(
        "The messages contain every control character and noncharacter, so none is left to mark "
        "text with. Remove one of U+0080 to U+009F or U+FDD0 to U+FDEF."
    )


def escapes(mark: str) -> tuple[str, ...]:
    """Returns the mark as `tojson` with ensure_ascii and the repr of a list write it."""
    return tuple(dict.fromkeys((f"\\u{ord(mark):04x}", repr(mark)[1:-1])))
