"""Text to token ids and back, from the checkpoint's own tokenizer.json."""

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import tokenizers

from mlx_server.errors import ModelUnusable, ServerError, told
from mlx_server.vocabulary import byte_letters, is_control

PROBE = "Hello, 123 wörld!\n"

MOST_GROWTH = 1000
"""Times that a normalizer may make a text longer; real ones replace a sign by another."""


class Tokenizer:
    def __init__(self, path: Path) -> None:
        with _its_fault(path.name):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            _check_growth(self._tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        _keep_nothing(self._tokenizer)
        self.decode(self.encode(PROBE))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Special tokens spelled in the text become special tokens: for text that a template or
        the owner wrote. Rendering keeps everybody else's text apart (families/seal.py)."""
        # in a batch of one, since `encode` keeps all other threads waiting
        with _its_fault("tokenizer.json"):
            (found,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        ids: list[int] = found.ids
        return ids

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token: a text has at least its length by this of them."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def encode_as_spelled(self, text: str) -> list[int]:
        """Control tokens only where they are spelled exactly.

        A normalizer makes them of other characters as well: those are then taken one by one.
        """
        with _its_fault("tokenizer.json"):
            (found,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        control = self.control_tokens
        made = [
            (a, b)
            for token, (a, b) in zip(found.ids, found.offsets, strict=True)
            if token in control
            and token not in self._unknown
            and text[a:b].strip() != control[token].strip()
        ]
        if not made:
            ids: list[int] = found.ids
            return ids
        if len(text) == 1:
            return self.as_text(text)
        cuts = sorted({0, len(text), *(place for a, b in made for place in range(a, b + 1))})
        return [id for a, b in pairwise(cuts) for id in self.encode_as_spelled(text[a:b])]

    def as_text(self, character: str) -> list[int]:
        """A control token of one character can't be cut: what the model itself makes of it, which
        may be nothing."""
        ids = self.encode(character)
        if self.control_tokens.keys().isdisjoint(ids):
            return ids
        whole = self._tokenizer
        with _its_fault("tokenizer.json"):
            text = whole.normalizer.normalize_str(character) if whole.normalizer else character
            split = whole.pre_tokenizer
            words = [word for word, _ in split.pre_tokenize_str(text)] if split else [text]
            ids = [token.id for word in words for token in whole.model.tokenize(word)]
        return [id for id in ids if id not in self.control_tokens]

    @cached_property
    def _unknown(self) -> frozenset[int]:
        """What the model makes of a character that no vocabulary has."""
        return frozenset(self.encode("\ufdd0"))

    def decode(self, ids: list[int]) -> str:
        with _its_fault("tokenizer.json"):
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def raw(self, ids: list[int]) -> str:
        """Special tokens included: what a replay model plays."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def spelling(self, token: int) -> str:
        """The token as text of its own, special tokens included."""
        # Behind itself, since some decoders drop the space of a text's first token.
        once, twice = (
            self._tokenizer.decode([token] * times, skip_special_tokens=False) for times in (1, 2)
        )
        return str(twice[len(once) :])

    def bytes_of(self, token: int, *, first: bool = False) -> bytes:
        """The token's own bytes, also where they are only a part of a character.

        first: as the beginning of a text, where some tokenizers drop a space.
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
        """The bytes of a token that is written in a byte-level vocabulary's letters."""
        letters = byte_letters()
        try:
            return bytes(letters[c] for c in self._tokenizer.id_to_token(token) or "")
        except KeyError:
            return None

    def is_silent(self, token: int) -> bool:
        """Special tokens have no text, nor have ids that only the model's output head knows."""
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
        """Finds where a control token is spelled, overlapping ones too.

        Matches are empty; their group 1 is the longest token that begins there.
        """
        longest_first = sorted(self.control_tokens.values(), key=len, reverse=True)
        if not longest_first:
            return None
        # few characters can begin a token, so most places are dismissed by one look
        first = "".join(re.escape(token[0]) for token in longest_first)
        return re.compile(f"(?=[{first}])(?=({'|'.join(map(re.escape, longest_first))}))")

    def spelled(self, text: str) -> Iterator[tuple[int, int]]:
        """Beginning and end of every control token that the text spells."""
        for match in self.control.finditer(text) if self.control else ():
            yield match.span(1)

    def marked(self, text: str) -> bytes:
        """The text with every control token that it spells as the byte 255 and its id."""
        ids = {spelling: id for id, spelling in self.control_tokens.items()}
        parts, at = [], 0
        for start, end in self.spelled(text):
            if start >= at:
                parts += [text[at:start].encode(), b"\xff[%d]" % ids[text[start:end]]]
                at = end
        return b"".join([*parts, text[at:].encode()])

    def risky(self, text: str) -> set[int]:
        """Places behind characters with which the text could be a part of a control token."""
        spelled = {start + 1 for start, _ in self.spelled(text)}
        edges = {match.end() for match in self._edges.finditer(text)}
        # the template may write the edges around it
        inside = {1} if _letters(text) in self._cores else set()
        return spelled | edges | inside

    @cached_property
    def _edges(self) -> re.Pattern[str]:
        found = {edge for token in self.control_tokens.values() for edge in (token[0], token[-1])}
        signs = [re.escape(edge) for edge in found if not edge.isalnum() and not edge.isspace()]
        return re.compile(f"[{''.join(signs)}]" if signs else "(?!)")

    @cached_property
    def _cores(self) -> frozenset[str]:
        return frozenset(map(_letters, self.control_tokens.values())) - {""}

    def detokenizer(self) -> "Detokenizer":
        return Detokenizer(self)


class Detokenizer:
    """Token ids to text, one at a time; keeps back the bytes of an unfinished character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._characters = getincrementaldecoder("utf-8")("replace")
        self._begun = False

    def feed(self, token: int) -> str:
        if self._tokenizer.is_silent(token):
            return ""
        own = self._tokenizer.bytes_of(token, first=not self._begun)
        self._begun = True
        return self._characters.decode(own)

    def finish(self) -> str:
        """What is left of an answer that ended inside a character."""
        return self._characters.decode(b"", final=True)


@contextmanager
def _its_fault(file: str) -> Iterator[None]:
    try:
        yield
    except (ServerError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # nothing narrower, and the library's panics are no Exception
        raise ModelUnusable(
            f"{file} of this model can't be read or used: {told(error)}. Download the model again."
        ) from None


def _keep_nothing(tokenizer: tokenizers.Tokenizer) -> None:
    """By itself it keeps what it made of ten thousand words, which are clients' and of up to 256
    letters: megabytes that stay as long as the model, and it is no faster for them."""
    if resize := getattr(tokenizer.model, "_resize_cache", None):
        resize(0)


def _check_growth(tokenizer: tokenizers.Tokenizer) -> None:
    normalizer = tokenizer.normalizer
    growth = prod(_growths(json.loads(normalizer.__getstate__()))) if normalizer else 1
    if growth > MOST_GROWTH:
        raise ValueError("its normalizer makes texts far longer than they are")


def _growths(step: Any) -> Iterator[int]:
    """Of each replacement in a normalizer, whatever holds it."""
    if isinstance(step, dict):
        yield max(1, len(str(step.get("content") or "")))
        step = list(step.values())
    for inner in step if isinstance(step, list) else ():
        yield from _growths(inner)


def _letters(text: str) -> str:
    """The letters and digits that are left however a template edits the text around them."""
    return re.sub(r"[\W_]+", "", text.casefold())
