"""A checkpoint's tokens as bytes, from its tokenizer.json, and llguidance's trie of them.

llguidance's LLTokenizer can read the file by itself, but then holds the GIL for 1.7 s where a BPE
vocabulary has 150,000 tokens; here no single wait is longer than 0.7 s, and most are far shorter.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from mlx_server import limits
from mlx_server.checkpoints.control_tokens import bytes_to_unicode, is_control, is_letter
from mlx_server.system.files import read_regular
from mlx_server.worker.constrained_decoding.token_classes import TokenClasses

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
