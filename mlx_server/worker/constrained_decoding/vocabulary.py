"""A model's vocabulary: its tokens' bytes and trie, and classes of tokens."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from mlx_server import limits
from mlx_server.models.tokenizer_file import bytes_to_unicode, is_control, is_letter
from mlx_server.system.files import read_regular

Mask = NDArray[np.int32]
Ids = NDArray[np.intp]

WORD = 32
MOST_BYTES = 24
"""Longer tokens are not used where a text is cut into tokens."""
MOST_LED = 24
"""The characters of an ending to whose beginning tokens are looked for that lead there."""
CLOSERS, QUOTES = b"}])", b"\"'"
SPACE = b" \t\r\n"


class TokenClasses:
    """Groups a vocabulary's tokens by what they do to the end of a JSON text.

    A mask may allow 100,000 tokens, and to ask the matcher about each would take longer than the
    model. Tokens of the same characters do the same: ` Paris` and ` Lyon` leave the ending of a
    string as it is, and each `[[` or `{"` makes an ending longer. So a token has a kind, a bit for
    each sort of character in it, and some tokens of a kind are asked for all of them.
    """

    def __init__(
        self, texts: Sequence[bytes], stop_tokens: Sequence[int], control: Collection[int]
    ) -> None:
        """texts: the bytes of each token. control: control tokens; it may include stop tokens."""
        self.apart = {*control, *stop_tokens}
        self.texts = texts
        self.stop = stop_tokens[0]
        self.stops = sorted(stop_tokens)
        controls = np.array(sorted(self.apart - {*stop_tokens}), dtype=np.intp)
        self.usable = np.zeros(max(len(texts), *self.stops, 0) + WORD, dtype=np.bool_)
        self.usable[: len(texts)] = True
        self.usable[self.stops] = False
        self.ids = {
            text: id
            for id, text in reversed(list(enumerate(texts)))
            if text and id not in self.apart
        }
        self._sizes = _sizes(self.ids)
        self.ink = np.zeros(len(self.usable), dtype=np.int64)
        """The size of each token's text without the blanks before it, 0 for control tokens."""
        self.ink[: len(texts)] = [
            len(text.lstrip()) * (id not in self.apart) for id, text in enumerate(texts)
        ]
        kind = _kinds(texts)
        kind[controls] = -1 - np.arange(len(controls))
        order = np.argsort(kind, kind="stable")
        self._kind, self._order = kind, order[self.usable[order]]
        self.plain = self._plain(kind)
        single = sorted((text, id) for text, id in self.ids.items() if len(text) == 1)
        closers = [id for text, id in single if text in CLOSERS]
        others = sorted((text not in QUOTES, text in SPACE, text, id) for text, id in single)
        self.closing = [*closers, *controls.tolist(), *(id for *_, id in others)]
        """Tokens of one byte and control tokens, those first that end what is open."""
        self._led = _led(texts, kind)

    def by_kind(self, mask: Mask) -> list[Ids]:
        """Returns the tokens that a mask allows, in groups of one kind."""
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little").view(np.bool_)
        order = self._order
        order = order if len(bits) >= len(self._kind) else order[order < len(bits)]
        ids = order[bits[order]]
        edges = np.flatnonzero(np.diff(self._kind[ids])) + 1
        return np.split(ids, edges) if len(ids) else []

    def _plain(self, kind: NDArray[np.int64]) -> Mask:
        """Returns a mask of the tokens that stay inside a JSON text: whole characters without
        quotes, backslashes and line ends."""
        plain = (kind >= 0) & (kind & _MARKED == 0) & (kind != 0)
        flags = np.zeros(-(-len(self.usable) // WORD) * WORD, dtype=np.bool_)
        flags[: len(plain)] = plain & self.usable[: len(plain)]
        return np.packbits(flags, bitorder="little").view(np.int32)

    def beginnings(self, text: bytes) -> Iterator[tuple[int, list[int]]]:
        """Yields the sizes of the text's beginnings that tokens have, with these tokens, and those
        that have more of a string before it."""
        for size in range(1, min(len(text), MOST_LED) + 1):
            beginning = text[:size]
            ids = [self.ids[beginning]] if beginning in self.ids else []
            if ids or beginning in self._led:
                yield size, [*ids, *self._led.get(beginning, ())]

    def cut(self, text: bytes) -> list[int]:
        """Cuts a text into tokens greedily, longest first; [] if the vocabulary can't spell it."""
        found: list[int] = []
        at, ids = 0, self.ids
        while at < len(text):
            for size in self._sizes.get(text[at : at + 2], _ONE_BYTE):
                if (id := ids.get(text[at : at + size])) is not None:
                    break
            else:
                return []
            found.append(id)
            at += len(self.texts[id])
        return found

    def joined(self, tokens: Sequence[int]) -> list[int]:
        """Returns the same text in fewer, longer tokens."""
        found, text = list[int](), b""
        for token in tokens:
            if token in self.apart:
                found += [*self.cut(text), token]
                text = b""
            else:
                text += self.texts[token]
        return found + self.cut(text)

    def text_of(self, token: int) -> bytes:
        """Returns a token's text, which is empty for a control token."""
        return b"" if token in self.apart or token >= len(self.texts) else self.texts[token]


_ONE_BYTE = (1,)


def _sizes(texts: Iterable[bytes]) -> dict[bytes, list[int]]:
    """Returns the sizes of the texts that begin with each two bytes, the longest first, and 1."""
    found: dict[bytes, set[int]] = {}
    for text in texts:
        if 1 < len(text) <= MOST_BYTES:
            found.setdefault(text[:2], {1}).add(len(text))
    return {beginning: sorted(sizes, reverse=True) for beginning, sizes in found.items()}


_MARKS = [b'"', b"\\", b"{}", b"[]", b",", b":", b"<>", b"'()`", b"\n\r\t\x0b"]
_MARKED = (1 << 0 | 1 << 1 | 1 << 8) << 4 | 15
"""The bits of quotes, backslashes, line ends and incomplete characters."""
_QUOTED = 1 << 0 << 4
"""The bit of double quotes."""
_ENDS_A_TEXT = frozenset(b"\\\n\r\t\x0b")
"""What may end or change a quoted text, besides a double quote."""

_PLAIN = [str.isalpha, str.isdigit, str.isspace]


def _plain_bits(text: str) -> int:
    """Returns the bits of letters, digits and white space."""
    if text.isalpha():
        return 1 << len(_MARKS)
    return sum(1 << len(_MARKS) + n for n, has in enumerate(_PLAIN) if any(map(has, text)))


def _bits(byte: int) -> int:
    """Returns the kinds of characters that a byte of a token shows by itself."""
    marks = sum(1 << n for n, mark in enumerate(_MARKS) if byte in mark)
    return (marks | _plain_bits(chr(byte))) << 4 if byte < 128 else _MULTIBYTE


_MULTIBYTE = 4
"""The bit of texts that are not ASCII."""
_BITS = np.array([_bits(byte) for byte in range(256)], dtype=np.int64)


def _kinds(texts: Sequence[bytes]) -> NDArray[np.int64]:
    """Returns which kinds of characters each token has, as bits: tokens with the same bits usually
    have the same effect on an ending."""
    sizes = np.array([len(text) for text in texts], dtype=np.int64)
    kinds = np.zeros(len(texts), dtype=np.int64)
    if not sizes.any():
        return kinds
    starts = (np.cumsum(sizes) - sizes)[sizes > 0]
    written = np.frombuffer(b"".join(texts), dtype=np.uint8)
    kinds[sizes > 0] = np.bitwise_or.reduceat(_BITS[written], starts)
    for id in np.flatnonzero(kinds & _MULTIBYTE).tolist():
        whole = texts[id].decode("utf-8", "ignore")
        kinds[id] |= _plain_bits(whole) << 4
        if whole.encode() != texts[id]:
            kinds[id] += missing_bytes(texts[id])
    return kinds


def missing_bytes(text: bytes) -> int:
    """Returns how many bytes of the last character of a UTF-8 text are yet to come."""
    for have, byte in enumerate(reversed(text[-3:]), 1):
        if byte >= 0xC0:
            return max(0, 2 + (byte >= 0xE0) + (byte >= 0xF0) - have)
        if byte < 0x80:
            return 0
    return 0


def _led(texts: Sequence[bytes], kind: NDArray[np.int64]) -> dict[bytes, list[int]]:
    """Returns the tokens that have plain characters and then a double quote, by their text from
    there on."""
    led: dict[bytes, list[int]] = {}
    for id in np.flatnonzero((kind > 0) & (kind & _QUOTED != 0)).tolist():
        before, quote, after = texts[id].partition(b'"')
        if before and not _ENDS_A_TEXT.intersection(before):
            led.setdefault(quote + after, []).append(id)
    return led


Bitmask = NDArray[np.uint32]
"""One bit for each token: whether it is allowed."""


class UnusableVocabulary(ValueError):
    """The tokenizer supports neither grammars nor thinking budgets."""


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _AddedToken(msgspec.Struct):
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    model: _TokenizerModel
    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None


class Vocabulary:
    def __init__(self, folder: Path, stop_tokens: Sequence[int]) -> None:
        """Raises UnusableVocabulary."""
        file = _tokenizer_file(folder / "tokenizer.json")
        names = _names(file.model.vocab)
        added = dict(_numbered(file.added_tokens, names))
        spelled = _decoder_of(file.decoder)
        self.control = {
            id: a.content
            for id, a in added.items()
            if is_control(a.content, a.special) and not is_letter(a.content, names)
        }
        size = 1 + max((*names.values(), *added), default=0)
        if size > limits.VOCABULARY_TOKENS:
            raise UnusableVocabulary(
                f"tokenizer.json has token id {size - 1}; at most "
                f"{limits.VOCABULARY_TOKENS} tokens are supported"
            )
        self.text = [b""] * size
        """The bytes of each token; a control token is byte 255 and its id in brackets."""
        for name, id in names.items():
            self.text[id] = spelled(name)
        for id, token in added.items():
            self.text[id] = b"\xff[%d]" % id if id in self.control else spelled(token.content)
        self.stop_tokens = [id for id in stop_tokens if 0 <= id < size]
        self.ends = _bitmask(self.stop_tokens, size)
        self.known = _bitmask((id for id, text in enumerate(self.text) if text), size)
        """The ids that are tokens: a grammar can name others."""
        self._trie: LLTokenizer | None = None
        self._token_classes: TokenClasses | None = None

    def __len__(self) -> int:
        return len(self.text)

    def build(self) -> "Vocabulary":
        """Builds the trie, the slowest part, which holds the GIL; two calls shorten each wait."""
        if self.stop_tokens:
            bare = LLTokenizer(
                TokenizerWrapper(_LlguidanceVocabulary(self)), eos_token=self.stop_tokens, slices=[]
            )
            # With slices, a mask inside a JSON string takes an eighth of the time.
            self._trie = bare.with_slices(LLTokenizer.general_slices())
            self._token_classes = TokenClasses(self.text, self.stop_tokens, self.control)
        return self

    @property
    def trie(self) -> LLTokenizer:
        if self._trie is None:
            raise UnusableVocabulary("the model has no known stop token")
        return self._trie

    @property
    def token_classes(self) -> TokenClasses:
        """The token classes that grammar completion uses."""
        assert self._token_classes is not None
        return self._token_classes


class _LlguidanceVocabulary:
    """A vocabulary in the form that llguidance's TokenizerWrapper expects."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.stop_tokens[0]
        self.bos_token_id = None
        self.tokens = [
            vocabulary.control[id].encode() if id in vocabulary.control else text
            for id, text in enumerate(vocabulary.text)
        ]
        self.special_token_ids = list(vocabulary.control)

    def __call__(self, text: bytes) -> list[int]:
        """Tokenizes text that a grammar forces; ours force none, see grammars/lark.py."""
        return []


def _tokenizer_file(path: Path) -> _TokenizerFile:
    try:
        return msgspec.json.decode(read_regular(path), type=_TokenizerFile)
    except FileNotFoundError:
        raise UnusableVocabulary("the model has no tokenizer.json") from None
    except (OSError, msgspec.DecodeError) as error:
        raise UnusableVocabulary(f"tokenizer.json can't be read: {error}") from None


def _names(vocab: dict[str, int] | list[tuple[str, float]]) -> dict[str, int]:
    if isinstance(vocab, dict):
        return {name: id for name, id in vocab.items() if id >= 0}
    return {name: id for id, (name, _) in enumerate(vocab)}


def _numbered(added: list[_AddedToken], names: dict[str, int]) -> Iterator[tuple[int, _AddedToken]]:
    """Numbers added tokens as the tokenizers library does, whatever ids the file gives."""
    taken = dict(names)
    last = -1
    for token in added:
        if token.content:
            id = taken.setdefault(token.content, max(len(names), last + 1))
            last = max(last, id)
            yield id, token


def _decoder_of(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """Returns a function from a token's name to its bytes."""
    steps = list(_steps(decoder or {}))
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    if not kinds & {"Metaspace", "ByteFallback", "Replace"}:
        raise UnusableVocabulary("tokenizer.json has no decoder of a supported type")
    replaced = [pair for step in steps for pair in _replacements(step)]
    return _sentence_piece(replaced, in_bytes="ByteFallback" in kinds)


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        for step in decoder.get("decoders", ()):
            yield from _steps(step)
    else:
        yield decoder


def _replacements(step: dict[str, Any]) -> Iterator[tuple[str, str]]:
    match step:
        case {"type": "Metaspace", "replacement": str(mark)}:
            yield mark, " "
        case {"type": "Replace", "pattern": {"String": str(mark)}, "content": str(text)}:
            yield mark, text


_LETTERS = str.maketrans({letter: chr(byte) for letter, byte in bytes_to_unicode().items()})
_LETTERED = re.compile(f"[{re.escape(''.join(bytes_to_unicode()))}]*")


def _byte_level(name: str) -> bytes:
    if _LETTERED.fullmatch(name):
        return _no_control(name.translate(_LETTERS).encode("latin-1"))
    return name.encode()


def _sentence_piece(replaced: list[tuple[str, str]], *, in_bytes: bool) -> Callable[[str], bytes]:
    def spelled(name: str) -> bytes:
        if in_bytes and (byte := re.fullmatch(r"<0x([0-9A-F]{2})>", name)):
            return _no_control(bytes.fromhex(byte[1]))
        for mark, text in replaced:
            name = name.replace(mark, text)
        return name.encode()

    return spelled


def _no_control(text: bytes) -> bytes:
    """Replaces the byte of control tokens by another one that is never part of a character."""
    return text.replace(b"\xff", b"\xfe")


def _bitmask(ids: Sequence[int] | Iterator[int], size: int) -> Bitmask:
    flags = np.zeros(-(-size // 32) * 32, np.bool_)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").view(np.uint32)
