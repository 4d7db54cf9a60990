"""Drafts for code inside JSON strings and diffs, as agents' edits have it.

Escaped text, and lines that begin with a mark, have other tokens than the file in the prompt, so
that a lookup of tokens loses them at the end of each line. So the answer's end is read as the file
has it and found in the prompt's text, and what follows there is written as the answer does and cut
into tokens. Line numbers, as tools show them, are left out.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mlx_server.worker.speculation.approximate_tokenizer import ApproximateTokenizer
from mlx_server.worker.speculation.draft import Draft
from mlx_server.worker.speculation.lookup import BLOCK, PLACES, PlaceIndex

PIECE = 16_384
"""The tokens of the prompt whose text is read for one draft: no step waits for all of it."""

LEAST, MOST_MATCH = 8, 64
"""The bytes that have to agree, and those that are compared."""
TAIL, DIFF_TAIL = 2 * MOST_MATCH, 1024
"""The bytes of the answer that are looked at; in a diff, new lines may be after the file's."""
TOKEN_BYTES = 6
"""The bytes of a draft's text for each of its tokens: the text has more tokens than are taken."""

LINE_NUMBER = re.compile(rb"^ *\d{1,9}(?:\t|\xe2\x86\x92)", re.MULTILINE)
HUNK = re.compile(rb"^(?:@@|\*\*\* Update File)", re.MULTILINE)
"""Where changes begin in a diff, and in Codex's patches. Each line after it has a mark."""
IN_STRING = re.compile(rb'"\s?:\s?"')
ESCAPE = re.compile(rb"\\.", re.DOTALL)
ESCAPED = re.compile(rb'\\(["\\/bfnrt])')
SPECIAL = re.compile(rb'["\\\n\r\t\x08\x0c]')
NAMES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"b": b"\x08", b"f": b"\x0c"}
ESCAPES = {byte: b"\\" + name for name, byte in NAMES.items()} | {b'"': b'\\"', b"\\": b"\\\\"}

MIXED = np.uint64(0x9E3779B97F4A7C15)
"""Spreads the eight bytes at a place over the upper bits, of which the index has 48."""


class TextLookup:
    def __init__(
        self,
        prompt: Sequence[int],
        text_of: Callable[[int], bytes],
        tokenizer: ApproximateTokenizer,
    ) -> None:
        """text_of: the bytes of a token, none for a control token."""
        self._prompt, self._text_of, self._tokenizer = prompt, text_of, tokenizer
        self._tail = b""
        self._is_json = False
        """Whether the answer has a JSON string."""
        self._is_diff = False
        """Whether it has a diff. Until there is either, the prompt's text is not read."""
        self._mark = b""
        """That of the line which the draft goes on with; empty outside of a diff."""
        self._pieces: list[bytes] = []
        self._source: bytes | None = None
        """The prompt's text, once all its pieces are read."""
        self._at: int | None = None
        self._match = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._at = None
        self._tail = (self._tail + b"".join(map(self._text_of, tokens)))[-DIFF_TAIL:]
        latest = self._tail[-TAIL:]
        self._is_json = self._is_json or IN_STRING.search(latest) is not None
        self._is_diff = self._is_diff or HUNK.search(latest) is not None

    def draft(self, most: int) -> Draft | None:
        if not (self._is_json or self._is_diff):
            return None
        if (source := self._read()) is None:
            return None
        if self._at is None:
            self._at, self._match = self._find(source)
        if self._match < LEAST:
            return None
        text = source[self._at : self._at + TOKEN_BYTES * most]
        if self._mark:
            begin = self._mark if self._tail.endswith(b"\n") else b""
            written = begin + text.replace(b"\n", b"\n" + self._mark)
        else:
            written = SPECIAL.sub(lambda special: ESCAPES[special[0]], text)
        tokens = self._tokenizer.tokens(written, most)
        kind = "diff" if self._mark else "text"
        return Draft(tokens, kind, self._match // 4) if tokens else None

    def _read(self) -> bytes | None:
        if self._source is None:
            end = (len(self._pieces) + 1) * PIECE
            piece = b"".join(map(self._text_of, self._prompt[end - PIECE : end]))
            self._pieces.append(LINE_NUMBER.sub(b"", piece))
            if end < len(self._prompt):
                return None
            self._source = b"".join(self._pieces)
            self._pieces.clear()
            self._index = PlaceIndex(max(0, len(self._source) - LEAST + 1))
        if (begin := self._index.next_block) is not None:
            self._index.read_block(_keys(self._source[begin : begin + BLOCK + LEAST - 1]))
        return self._source

    def _find(self, source: bytes) -> tuple[int, int]:
        """Returns the place at which most of the answer's last bytes precede, and how many."""
        if self._is_diff:
            tail, self._mark = _unmarked(self._tail)
        else:
            tail = _unescaped(self._tail[-TAIL:])
        if len(tail) < LEAST:
            return 0, 0
        best, most = 0, 0
        for count, place in enumerate(self._index.places(int(_keys(tail[-LEAST:])[0]))):
            end = place + LEAST
            before = source[max(0, end - MOST_MATCH) : end]
            pairs = enumerate(zip(reversed(before), reversed(tail), strict=False))
            match = next((n for n, (a, b) in pairs if a != b), min(len(before), len(tail)))
            if match > most:
                best, most = end, match
            if count >= PLACES or most >= MOST_MATCH:
                break
        return best, most


def _unescaped(tail: bytes) -> bytes:
    """Returns the text of the JSON string that is not closed at the end."""
    string = tail[ESCAPE.sub(b"..", tail).rfind(b'"') + 1 :]
    return ESCAPED.sub(lambda escape: NAMES.get(escape[1], escape[1]), string)


def _unmarked(tail: bytes) -> tuple[bytes, bytes]:
    """Returns what the file had before the end of a diff, and the mark of the line that goes on
    there. That of a line to come is guessed: lines that stay and that go come in runs. The text is
    empty within a new line."""
    *lines, last = tail.split(b"\n")
    hunk = next((at for at in reversed(range(len(lines))) if HUNK.match(lines[at])), 0)
    lines = lines[hunk + 1 :]  # the first one may be cut
    if not lines or last[:1] not in (b"", b" ", b"-"):
        return b"", b" "
    before = lines[-1][:1] if lines[-1].startswith((b" ", b"-")) else b" "
    kept_lines = (line[1:] + b"\n" for line in lines if line.startswith((b" ", b"-")))
    return b"".join(kept_lines) + last[1:], last[:1] or before


def _keys(text: bytes) -> NDArray[np.uint64]:
    """Returns a number below 2**48 for the eight bytes at each place."""
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(text, np.uint8), LEAST)
    keys: NDArray[np.uint64] = np.ascontiguousarray(windows).view(np.uint64)[:, 0]
    return keys * MIXED >> np.uint64(16)
