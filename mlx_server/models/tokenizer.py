"""Converts text to token ids and back with the checkpoint's tokenizer.json."""

import re
from array import array
from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from mlx_server.errors import ContextTooLong, ModelUnusable
from mlx_server.models.tokenizer_file import (
    BEFORE_ENTRY,
    PROBE,
    ControlTokenEscape,
    TokenizerFile,
    bytes_to_unicode,
    content_of,
    decoder_of,
    file_error,
    is_control,
    pattern_of,
)
from mlx_server.models.tokenizer_process import TokenizerProcess
from mlx_server.request_threads import check_wanted

Ids: TypeAlias = "array[int]"
"""Ids of a prompt that may be too long, as an array since a list takes ten times the memory."""

WINDOW = 1 << 16
"""Characters of a long text that are searched or tokenised at a time."""

FEW = 16
"""Upper bound on the tokens that a cut can add to a text."""

AROUND = 512
"""Characters on both sides of a cut that show whether tokens end there."""

FEW_IDS = 256
"""The most ids that are decoded in this process, since that blocks all other threads."""

SMALL_FILE_BYTES = 128 << 10
"""A larger tokenizer.json is read by another process, because reading it blocks this one."""

SPELLINGS = 8192
"""The most tokens whose text is kept: the decoder takes 100 times as long as a look-up, and each
log probability of an answer needs its token's text."""


class Tokenizer:
    def __init__(self, path: Path, calls: TokenizerFile | TokenizerProcess | None = None) -> None:
        """calls: what makes the calls that need the file; None: this process. Raises
        ModelUnusable."""
        self._calls = calls or TokenizerFile(content_of(path))
        facts = self._calls.facts()
        self._entries, self._ends = facts.entries, memoryview(facts.ends).cast("I")
        self._added = {token.id: token for token in facts.added}
        self._decoder = decoder_of(facts)
        self.vocabulary = facts.size
        self.longest = facts.longest
        """Characters of the longest token, which gives a lower bound on a text's tokens."""
        self._control_with: dict[str, re.Pattern[str] | None] = {}
        self._spellings: dict[int, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Tokenise trusted text: special tokens in it become special tokens. A client's text must
        pass prompts/control_token_guard.py."""
        return self._calls.encode(text, add_special_tokens)

    def encode_prompt(self, text: str, most: int, *, add_special_tokens: bool = True) -> list[int]:
        """Like `encode`, with special tokens added. Raises ContextTooLong early."""
        if len(text) <= 2 * WINDOW:
            return self.encode(text, add_special_tokens=add_special_tokens)
        ids = self._encoded(text, most, self.encode)
        return self.with_special_tokens(ids) if add_special_tokens else [*ids]

    def with_special_tokens(self, ids: Iterable[int]) -> list[int]:
        """The ids, between the special tokens that the tokenizer adds to a text."""
        plain, added = self.encode(PROBE), self.encode(PROBE, add_special_tokens=True)
        starts = (i for i in range(len(added)) if added[i : i + len(plain)] == plain)
        begin = next(starts, 0)
        return [*added[:begin], *ids, *added[begin + len(plain) :]]

    def pair(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], int]:
        """Two texts between the special tokens that the tokenizer adds to a pair, and the place
        from which on the tokens are those of the second."""
        ids, types = self._calls.encode_pair()
        plain = self.encode(PROBE)
        starts = [i for i in range(len(ids)) if ids[i : i + len(plain)] == plain]
        if len(starts) != 2:
            raise ModelUnusable("tokenizer.json does not say how a pair of texts is written.")
        end = starts[0] + len(plain)
        between = ids[end : starts[1]]
        begins = [*ids[: starts[0]], *first]
        kinds = types[end : starts[1]]
        place = len(begins) + (kinds.index(1) if 1 in kinds else len(kinds))
        return [*begins, *between, *second, *ids[starts[1] + len(plain) :]], place

    def encode_within(self, text: str, most: int | None, before: int = 0) -> Ids:
        """Like `encode_as_spelled`. Raises ContextTooLong as soon as there are more than `most`
        tokens, including the `before` earlier ones."""
        return self._encoded(text, most, self.encode_as_spelled, before)

    def _encoded(
        self, text: str, most: int | None, encode: Callable[[str], list[int]], before: int = 0
    ) -> Ids:
        ids = array("I")
        for piece in self._pieces(text, most):
            check_wanted()
            ids.extend(encode(piece))
            if most is not None and before + len(ids) > most:
                raise _too_long(before + len(ids))
        return ids

    def _pieces(self, text: str, most: int | None) -> Iterator[str]:
        """The text, cut where that changes no token if it is long: tokenising takes a hundred times
        the memory of a text."""
        at = 0
        while len(text) - at > 2 * WINDOW:
            cut = next(filter(partial(self._ends_tokens, text), _places(text, at + WINDOW)), None)
            if cut is None:
                self._check_rest(text, at, most)
                break
            yield text[at:cut]
            at = cut
        yield text[at:]

    def _ends_tokens(self, text: str, cut: int) -> bool:
        before, after = text[cut - AROUND : cut], text[cut : cut + AROUND]
        return self.encode(before + after) == self.encode(before) + self.encode(after)

    def _check_rest(self, text: str, at: int, most: int | None) -> None:
        """Raise ContextTooLong if a text that can't be cut is too long, by an estimate in pieces:
        each cut adds at most FEW tokens."""
        least = 0
        for begin in range(at, len(text), WINDOW):
            check_wanted()
            least += max(0, len(self.encode(text[begin : begin + WINDOW])) - FEW)
            if most is not None and least > most:
                raise _too_long(least)

    def encode_as_spelled(self, text: str) -> list[int]:
        """Tokenise with control tokens only where the text has them exactly.

        A normalizer can also make them from other characters, which are then tokenised singly.
        """
        ids, spans = self._calls.encode_marking(text)
        if not spans:
            return ids
        if len(text) == 1:
            return self.as_text(text)
        cuts = sorted({0, len(text), *(place for a, b in spans for place in range(a, b + 1))})
        return [id for a, b in pairwise(cuts) for id in self.encode_as_spelled(text[a:b])]

    def as_text(self, character: str) -> list[int]:
        """Tokenise a character as text even if it is a control token. The result may be empty."""
        ids = self.encode(character)
        if self.control_tokens.keys().isdisjoint(ids):
            return ids
        ids = self._calls.encode_character(character)
        return [id for id in ids if id not in self.control_tokens]

    def decode(self, ids: list[int]) -> str:
        return self._decoded(ids, skip=True)

    def raw(self, ids: list[int]) -> str:
        """The text with special tokens."""
        return self._decoded(ids, skip=False)

    def _decoded(self, ids: Sequence[int], *, skip: bool) -> str:
        if len(ids) > FEW_IDS:
            return self._calls.decode([*ids], skip)
        tokens = [text for id in ids if (text := self._decodable(id, skip=skip)) is not None]
        return self._joined(tokens)

    def _joined(self, tokens: list[str]) -> str:
        with file_error():
            return str(self._decoder.decode(tokens)) if self._decoder else " ".join(tokens)

    def _decodable(self, token: int, *, skip: bool) -> str | None:
        """What the decoder gets for a token, None if it gets nothing."""
        if added := self._added.get(token):
            return None if skip and added.skipped else added.decoded
        return self.entry(token)

    def id_of(self, token: str) -> int | None:
        entry = BEFORE_ENTRY + token.encode(errors="surrogatepass")
        at = self._entries.find(entry + BEFORE_ENTRY)
        if at < 0 and self._entries.endswith(entry):
            at = len(self._entries) - len(entry)
        return None if at < 0 else bisect_right(self._ends, at)

    def entry(self, token: int) -> str | None:
        """The token as the vocabulary has it; None if only the model's output head has it."""
        if not 0 <= token < len(self._ends):
            return None
        begin, end = self._ends[token - 1] if token else 0, self._ends[token]
        return self._entries[begin + 1 : end].decode() if begin < end else None

    def spelling(self, token: int) -> str:
        """The text of one token, special or not."""
        if (text := self._spellings.get(token)) is None:
            if len(self._spellings) >= SPELLINGS:
                self._spellings.clear()
            text = self._spellings[token] = self._decoded_alone(token)
        return text

    def _decoded_alone(self, token: int) -> str:
        if (text := self._decodable(token, skip=False)) is None:
            return ""
        # decoded after itself, since some decoders drop the space of a text's first token
        return self._joined([text, text])[len(self._joined([text])) :]

    def bytes_of(self, token: int, *, first: bool = False) -> bytes:
        """The token's bytes, which may be only a part of a character.

        With `first` they begin a text, where some tokenizers drop a space.
        """
        text = self.decode([token]) if first else self.spelling(token)
        if "�" not in text:
            return text.encode()
        raw = self.entry(token) or ""
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", raw):
            return bytes.fromhex(byte[1])
        token_bytes = self.byte_level(token)
        return text.encode() if token_bytes is None else token_bytes

    def byte_level(self, token: int) -> bytes | None:
        """The bytes of a token in a byte-level vocabulary's letters; None if it has others."""
        letters = bytes_to_unicode()
        try:
            return bytes(letters[c] for c in self.entry(token) or "")
        except KeyError:
            return None

    def is_silent(self, token: int) -> bool:
        """Whether a token has no text: it is special, or only the model's output head has it."""
        return token in self._special or self.entry(token) is None

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(id for id, token in self._added.items() if token.special)

    @cached_property
    def control_tokens(self) -> dict[int, str]:
        return {
            id: token.content
            for id, token in self._added.items()
            if is_control(token.content, token.special)
        }

    @cached_property
    def control(self) -> re.Pattern[str] | None:
        """Finds control tokens in a text, including overlapping ones; see `pattern_of`."""
        return pattern_of(self.control_tokens.values())

    def control_with(self, between: str) -> re.Pattern[str] | None:
        """Like `control`, with `between` allowed after each character."""
        if between not in self._control_with:
            self._control_with[between] = pattern_of(self.control_tokens.values(), between)
        return self._control_with[between]

    @cached_property
    def longest_control(self) -> int:
        return max(map(len, self.control_tokens.values()), default=0)

    def spelled(self, text: str) -> Iterator[tuple[int, int]]:
        """Start and end of every control token in the text."""
        for match in self.control.finditer(text) if self.control else ():
            yield match.span(1)

    def marked(self, text: str) -> bytes:
        """The text's bytes, with every control token as the byte 255 and its id in brackets."""
        ids = {spelling: id for id, spelling in self.control_tokens.items()}
        parts, at = [], 0
        for start, end in self.spelled(text):
            if start >= at:
                parts += [text[at:start].encode(), b"\xff[%d]" % ids[text[start:end]]]
                at = end
        return b"".join([*parts, text[at:].encode()])

    @cached_property
    def escaped(self) -> ControlTokenEscape:
        """Called with a text and a mark, it returns the text with the mark after each character
        that could make it part of a control token."""
        return ControlTokenEscape(self.control_tokens.values())

    def detokenizer(self, *, special: bool = False) -> "Detokenizer":
        return Detokenizer(self, special=special)


class Detokenizer:
    """Converts token ids to text one at a time, holding back the bytes of incomplete characters.

    A character that the end of the answer, or a control token, cuts off is no part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        """special: whether special tokens have their text too."""
        self._tokenizer, self._special = tokenizer, special
        self._characters = getincrementaldecoder("utf-8")("replace")
        self._begun = False

    def feed(self, token: int) -> str:
        if token in self._tokenizer.control_tokens:
            self._characters.reset()
        if self._tokenizer.is_silent(token):
            return self._tokenizer.spelling(token) if self._special else ""
        own = self._tokenizer.bytes_of(token, first=not self._begun)
        self._begun = True
        return self._characters.decode(own)


def _places(text: str, near: int) -> Iterator[int]:
    """Positions where the text could be cut, the most likely first."""
    for between in ("\n", " "):
        if (place := text.rfind(between, near - WINDOW // 4, near)) > 0:
            yield place + (between == "\n")
    yield from range(near - 1, near - 33, -1)


def _too_long(tokens: int) -> ContextTooLong:
    return ContextTooLong(
        f"The prompt has at least {tokens} tokens, which exceeds the model's context. Shorten it."
    )


def read_tokenizer(path: Path) -> Tokenizer:
    """Like `Tokenizer`, but blocks no other thread if the file is large."""
    is_small = path.stat().st_size <= SMALL_FILE_BYTES
    return Tokenizer(path, None if is_small else TokenizerProcess(path))
