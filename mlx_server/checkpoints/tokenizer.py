"""Converts text to token ids and back with the checkpoint's tokenizer.json."""

import json
import re
from array import array
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import tokenizers

from mlx_server import limits
from mlx_server.checkpoints.control_pattern import pattern_of
from mlx_server.checkpoints.control_token_escape import ControlTokenEscape
from mlx_server.checkpoints.file_kind import read_own
from mlx_server.checkpoints.token_text import bytes_to_unicode, is_control
from mlx_server.errors import ContextTooLong, ModelUnusable, ServerError, public_message
from mlx_server.request_threads import check_wanted

Ids: TypeAlias = "array[int]"
"""Ids of a prompt that may be too long, as an array since a list takes ten times the memory."""

WINDOW = 1 << 16
"""Characters of a long text that are searched or tokenised at a time."""

FEW = 16
"""Upper bound on the tokens that a cut can add to a text."""

AROUND = 512
"""Characters on both sides of a cut that show whether tokens end there."""

PROBE = "Hello, 123 wörld!\n"


class Tokenizer:
    def __init__(self, path: Path) -> None:
        with file_error(path.name):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(read_own(path))
            _check_growth(self._tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        _disable_cache(self._tokenizer)
        self._control_with: dict[str, re.Pattern[str] | None] = {}
        self.decode(self.encode(PROBE))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Tokenise trusted text: special tokens in it become special tokens. A client's text must
        pass prompts/control_token_guard.py."""
        # as a batch of one, since the library's `encode` blocks all other threads
        with file_error("tokenizer.json"):
            (found,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        ids: list[int] = found.ids
        return ids

    def encode_prompt(self, text: str, most: int, *, add_special_tokens: bool = True) -> list[int]:
        """Like `encode`, with special tokens added. Raises ContextTooLong early."""
        if len(text) <= 2 * WINDOW:
            return self.encode(text, add_special_tokens=add_special_tokens)
        found = self._encoded(text, most, self.encode)
        return self.with_special_tokens(found) if add_special_tokens else [*found]

    def with_special_tokens(self, ids: Iterable[int]) -> list[int]:
        """The ids, between the special tokens that the tokenizer adds to a text."""
        plain, added = self.encode(PROBE), self.encode(PROBE, add_special_tokens=True)
        starts = (i for i in range(len(added)) if added[i : i + len(plain)] == plain)
        begin = next(starts, 0)
        return [*added[:begin], *ids, *added[begin + len(plain) :]]

    def pair(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], int]:
        """Two texts between the special tokens that the tokenizer adds to a pair, and the place
        from which on the tokens are those of the second."""
        with file_error("tokenizer.json"):
            (found,) = self._tokenizer.encode_batch([(PROBE, PROBE)], add_special_tokens=True)
        ids, plain = found.ids, self.encode(PROBE)
        starts = [i for i in range(len(ids)) if ids[i : i + len(plain)] == plain]
        if len(starts) != 2:
            raise ModelUnusable("tokenizer.json does not say how a pair of texts is written.")
        end = starts[0] + len(plain)
        between = ids[end : starts[1]]
        begins = [*ids[: starts[0]], *first]
        kinds = found.type_ids[end : starts[1]]
        place = len(begins) + (kinds.index(1) if 1 in kinds else len(kinds))
        return [*begins, *between, *second, *ids[starts[1] + len(plain) :]], place

    def encode_within(self, text: str, most: int | None, before: int = 0) -> Ids:
        """Like `encode_as_spelled`. Raises ContextTooLong as soon as there are more than `most`
        tokens, including the `before` earlier ones."""
        return self._encoded(text, most, self.encode_as_spelled, before)

    def _encoded(
        self,
        text: str,
        most: int | None,
        encode: Callable[[str], list[int]],
        before: int = 0,
    ) -> Ids:
        found = array("I")
        for piece in self._pieces(text, most):
            check_wanted()
            found.extend(encode(piece))
            if most is not None and before + len(found) > most:
                raise _too_long(before + len(found))
        return found

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
        found = 0
        for begin in range(at, len(text), WINDOW):
            check_wanted()
            found += max(0, len(self.encode(text[begin : begin + WINDOW])) - FEW)
            if most is not None and found > most:
                raise _too_long(found)

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token, which gives a lower bound on a text's tokens."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def encode_as_spelled(self, text: str) -> list[int]:
        """Tokenise with control tokens only where the text has them exactly.

        A normalizer can also make them from other characters, which are then tokenised singly.
        """
        with file_error("tokenizer.json"):
            (found,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        control = self.control_tokens
        ids: list[int] = found.ids
        if control.keys().isdisjoint(ids):
            return ids  # without the offsets, which take long to list
        made = [
            (a, b)
            for token, (a, b) in zip(ids, found.offsets, strict=True)
            if token in control
            and token not in self._unknown
            and text[a:b].strip() != control[token].strip()
        ]
        if not made:
            return ids
        if len(text) == 1:
            return self.as_text(text)
        cuts = sorted({0, len(text), *(place for a, b in made for place in range(a, b + 1))})
        return [id for a, b in pairwise(cuts) for id in self.encode_as_spelled(text[a:b])]

    def as_text(self, character: str) -> list[int]:
        """Tokenise a character as text even if it is a control token. The result may be empty."""
        ids = self.encode(character)
        if self.control_tokens.keys().isdisjoint(ids):
            return ids
        whole = self._tokenizer
        with file_error("tokenizer.json"):
            text = whole.normalizer.normalize_str(character) if whole.normalizer else character
            split = whole.pre_tokenizer
            words = [word for word, _ in split.pre_tokenize_str(text)] if split else [text]
            ids = [token.id for word in words for token in whole.model.tokenize(word)]
        return [id for id in ids if id not in self.control_tokens]

    @cached_property
    def _unknown(self) -> frozenset[int]:
        """Ids of a character that is in no vocabulary."""
        return frozenset(self.encode("\ufdd0"))

    def decode(self, ids: list[int]) -> str:
        with file_error("tokenizer.json"):
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def raw(self, ids: list[int]) -> str:
        """The text with special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def entry(self, token: int) -> str | None:
        """The token as the vocabulary has it; None if only the model's output head has it."""
        found: str | None = self._tokenizer.id_to_token(token)
        return found

    def spelling(self, token: int) -> str:
        """The text of one token, special or not."""
        # decoded after itself, since some decoders drop the space of a text's first token
        once, twice = (
            self._tokenizer.decode([token] * times, skip_special_tokens=False) for times in (1, 2)
        )
        return str(twice[len(once) :])

    def bytes_of(self, token: int, *, first: bool = False) -> bytes:
        """The token's bytes, which may be only a part of a character.

        With `first` they begin a text, where some tokenizers drop a space.
        """
        text = self.decode([token]) if first else self.spelling(token)
        if "�" not in text:
            return text.encode()
        raw = self._tokenizer.id_to_token(token) or ""
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", raw):
            return bytes.fromhex(byte[1])
        found = self.byte_level(token)
        return text.encode() if found is None else found

    def byte_level(self, token: int) -> bytes | None:
        """The bytes of a token in a byte-level vocabulary's letters; None if it has others."""
        letters = bytes_to_unicode()
        try:
            return bytes(letters[c] for c in self._tokenizer.id_to_token(token) or "")
        except KeyError:
            return None

    def is_silent(self, token: int) -> bool:
        """Whether a token has no text: it is special, or only the model's output head has it."""
        return token in self._special or self._tokenizer.id_to_token(token) is None

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    @cached_property
    def vocabulary(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def control_tokens(self) -> dict[int, str]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {
            id: token.content
            for id, token in added.items()
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

    def escaped(self, text: str, mark: str) -> str:
        """The text with a mark after each character that could make it part of a control token."""
        return self._escape(text, mark)

    @cached_property
    def _escape(self) -> ControlTokenEscape:
        return ControlTokenEscape(self.control_tokens.values())

    def detokenizer(self) -> "Detokenizer":
        return Detokenizer(self)


class Detokenizer:
    """Converts token ids to text one at a time, holding back the bytes of incomplete characters.

    A character that the end of the answer, or a control token, cuts off is no part of the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._characters = getincrementaldecoder("utf-8")("replace")
        self._begun = False

    def feed(self, token: int) -> str:
        if token in self._tokenizer.control_tokens:
            self._characters.reset()
        if self._tokenizer.is_silent(token):
            return ""
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


@contextmanager
def file_error(file: str) -> Iterator[None]:
    """Raises ModelUnusable for any error of the library, which names the file."""
    try:
        yield
    except (ServerError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are not an Exception
        raise ModelUnusable(
            f"{file} of this model can't be read or used: {public_message(error)}. "
            "Download the model again."
        ) from None


def _disable_cache(tokenizer: tokenizers.Tokenizer) -> None:
    """The library's cache keeps ten thousand words of clients, of up to 256 letters: megabytes
    that stay as long as the model, without making it faster."""
    if resize := getattr(tokenizer.model, "_resize_cache", None):
        resize(0)


def _check_growth(tokenizer: tokenizers.Tokenizer) -> None:
    normalizer = tokenizer.normalizer
    growth = prod(_growths(json.loads(normalizer.__getstate__()))) if normalizer else 1
    if growth > limits.NORMALIZER_GROWTH.value:
        raise ValueError("its normalizer can make a text many times longer")


def _growths(step: Any) -> Iterator[int]:
    """The growth factor of each replacement in a normalizer, at any depth."""
    if isinstance(step, dict):
        yield max(1, len(str(step.get("content") or "")))
        step = list(step.values())
    for inner in step if isinstance(step, list) else ():
        yield from _growths(inner)
