"""A tokenizer.json as the tokenizers library reads it, which blocks every thread meanwhile: a large
file is read in a process of its own.

Which of its tokens are control tokens, and how ordinary text is kept from becoming one, the server
and the engine find out by the same functions.
"""

import json
import re
from array import array
from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from mlx_server import limits
from mlx_server.errors import ModelUnusable, ServerError, public_message
from mlx_server.models.files import read_own

PROBE = "Hello, 123 wörld!\n"

BEFORE_ENTRY = b"\xff"
"""A byte that no UTF-8 has."""

Spans = list[tuple[int, int]]
"""Begin and end of places in a text, in characters."""


class AddedToken(msgspec.Struct, frozen=True, array_like=True):
    id: int
    content: str
    special: bool
    decoded: str
    """What the decoder gets for the token: its content as a normalizer changes it."""
    skipped: bool
    """Whether `skip_special_tokens` leaves it out."""


class TokenizerFacts(msgspec.Struct, frozen=True):
    """What is known of a tokenizer without its tokenizing."""

    entries: bytes
    """The vocabulary's entries in the order of their ids, each after BEFORE_ENTRY."""
    ends: bytes
    """The end of each id's entry in `entries`, of 4 bytes; an id without one has no bytes there."""
    added: list[AddedToken]
    size: int
    """Number of tokens."""
    longest: int
    """Characters of the longest token."""
    decoder: str
    """The library's JSON of a tokenizer without tokens, which has this one's decoder."""


class TokenizerFile:
    """Makes the calls that need the file, in this process. They raise ModelUnusable."""

    def __init__(self, content: bytes) -> None:
        with file_error():
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            _check_growth("normalizer", self._tokenizer.normalizer, limits.NORMALIZER_GROWTH)
            _check_growth("decoder", self._tokenizer.decoder, limits.DECODER_GROWTH)
            _make_letters_text(self._tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        _disable_cache(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._control = {
            id: token.content
            for id, token in added.items()
            if is_control(token.content, token.special)
        }
        self.decode(self.encode(PROBE, False), True)
        self._unknown = frozenset(self.encode("\ufdd0", False))
        """Ids of a character that is in no vocabulary."""

    def encode(self, text: str, special: bool) -> list[int]:
        """special: whether to add the special tokens that begin and end a text."""
        # as a batch of one, since the library's `encode` blocks all other threads
        with file_error():
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def encode_pair(self) -> tuple[list[int], list[int]]:
        """The ids and types of the tokens of a pair of probes."""
        with file_error():
            (encoding,) = self._tokenizer.encode_batch([(PROBE, PROBE)], add_special_tokens=True)
        return encoding.ids, encoding.type_ids

    def encode_marking(self, text: str) -> tuple[list[int], Spans]:
        """The ids, and the places of control tokens that the text does not spell exactly."""
        with file_error():
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        control = self._control
        ids: list[int] = encoding.ids
        if control.keys().isdisjoint(ids):
            return ids, []  # without the offsets, which take long to list
        return ids, [
            (a, b)
            for token, (a, b) in zip(ids, encoding.offsets, strict=True)
            if token in control
            and token not in self._unknown
            and text[a:b].strip() != control[token].strip()
        ]

    def encode_character(self, character: str) -> list[int]:
        """The ids of a character that no added token has taken."""
        whole = self._tokenizer
        with file_error():
            text = whole.normalizer.normalize_str(character) if whole.normalizer else character
            split = whole.pre_tokenizer
            words = [word for word, _ in split.pre_tokenize_str(text)] if split else [text]
            return [token.id for word in words for token in whole.model.tokenize(word)]

    def decode(self, ids: list[int], skip: bool) -> str:
        with file_error():  # as a batch for the same reason
            (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=skip)
        return str(text)

    def facts(self) -> TokenizerFacts:
        whole = self._tokenizer
        ids: dict[str, int] = whole.get_vocab(with_added_tokens=True)
        added = [*self._added()]
        entries, ends = _listed(ids, added)
        return TokenizerFacts(
            entries=entries,
            ends=ends,
            added=added,
            size=len(ids),
            longest=max(map(len, ids), default=0),
            decoder=_without_tokens(whole.decoder),
        )

    def _added(self) -> Iterator[AddedToken]:
        whole = self._tokenizer
        decoder, whole.decoder = whole.decoder, None
        for id, token in whole.get_added_tokens_decoder().items():
            text = whole.decode([id], skip_special_tokens=False)
            skipped = bool(text) and not whole.decode([id], skip_special_tokens=True)
            yield AddedToken(id, token.content, token.special, text, skipped)
        whole.decoder = decoder


def content_of(path: Path) -> bytes:
    """Raises ModelUnusable if the file is too large, or is something else."""
    with file_error():
        if path.stat().st_size > limits.TOKENIZER_BYTES:
            raise ModelUnusable(
                f"tokenizer.json has more than {limits.TOKENIZER_BYTES >> 20} MiB. Download "
                "the model again, or use a checkpoint with a smaller one."
            )
        return read_own(path)


def decoder_of(facts: TokenizerFacts) -> Any:
    """The library's decoder, or None if there is none."""
    with file_error():
        return tokenizers.Tokenizer.from_str(facts.decoder).decoder


def _without_tokens(decoder: Any) -> str:
    bare = tokenizers.Tokenizer(tokenizers.models.BPE())
    if decoder is not None:
        bare.decoder = decoder
    state: str = bare.to_str()
    if len(state) > limits.DECODER_CHARACTERS:
        raise ModelUnusable(
            f"tokenizer.json: its decoder takes more than {limits.DECODER_CHARACTERS} "
            "characters. Download the model again."
        )
    return state


def _listed(ids: dict[str, int], added: Iterable[AddedToken]) -> tuple[bytes, bytes]:
    """The entries and their ends, see TokenizerFacts."""
    size = max(ids.values(), default=-1) + 1
    if size > limits.VOCABULARY_TOKENS:
        raise ModelUnusable(
            f"tokenizer.json has token id {size - 1}; at most {limits.VOCABULARY_TOKENS} "
            "tokens are supported. Download the model again."
        )
    texts = [b""] * size
    for token, id in ids.items():
        texts[id] = BEFORE_ENTRY + token.encode()
    for each in added:
        texts[each.id] = BEFORE_ENTRY + each.content.encode()
    return b"".join(texts), array("I", accumulate(map(len, texts))).tobytes()


@contextmanager
def file_error() -> Iterator[None]:
    try:
        yield
    except (ServerError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are not an Exception
        raise ModelUnusable(
            f"tokenizer.json of this model can't be read or used: {public_message(error)}. "
            "Download the model again."
        ) from None


def _make_letters_text(tokenizer: tokenizers.Tokenizer) -> None:
    added = tokenizer.get_added_tokens_decoder().values()
    letters = [it for it in added if it.special and len(it.content) == 1]
    vocabulary = tokenizer.get_vocab(with_added_tokens=False) if letters else {}
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(
                it.content, single_word=it.single_word, lstrip=it.lstrip, rstrip=it.rstrip
            )
            for it in letters
            if is_letter(it.content, vocabulary)
        ]
    )


def _disable_cache(tokenizer: tokenizers.Tokenizer) -> None:
    """The library's cache keeps ten thousand words of clients, of up to 256 letters: megabytes
    that stay as long as the model, without making it faster."""
    if resize := getattr(tokenizer.model, "_resize_cache", None):
        resize(0)


def _check_growth(name: str, steps: Any, most: int) -> None:
    if steps and prod(_growths(json.loads(steps.__getstate__()))) > most:
        raise ValueError(f"its {name} can make a text many times longer")


def _growths(step: Any) -> Iterator[int]:
    """The growth factor of each replacement in a normalizer or decoder, at any depth."""
    if isinstance(step, dict):
        yield max(1, len(str(step.get("content") or "")))
        step = list(step.values())
    for inner in step if isinstance(step, list) else ():
        yield from _growths(inner)


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
    source = options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"
    return f"(?:{source})?" if END in trie else source


def _chain(character: str, node: Trie, between: str) -> str:
    """The expression from a character on. Characters without alternatives need no groups."""
    pieces = [re.escape(character) + between]
    while len(node) == 1 and END not in node:
        ((character, node),) = node.items()
        pieces.append(re.escape(character) + between)
    return "".join(pieces) + (_source(node, between) if node.keys() != {END} else "")


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
    letters, longest = "", max(map(len, few))
    for begin in range(0, len(text), WINDOW):
        letters += _letters(text[begin : begin + WINDOW])
        if len(letters) > longest:
            return False
    return letters in few


def _letters(text: str) -> str:
    """The letters and digits of a text, which a template's edits do not change."""
    return re.sub(r"[\W_]+", "", text.casefold())
