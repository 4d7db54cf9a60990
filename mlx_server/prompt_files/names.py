"""Names of prompt cache files.

A prompt is cut into blocks of tokens. The link of a block is the digest of the link before it and
of the block's tokens, so it stands for all tokens up to the block's end, and prompts that begin
alike share the files of their common blocks. A state file has what can't be cut back, after a
number of tokens that need not end a block.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]

BLOCK_TOKENS = 256

FIRST_COMPARED = 64
"""The number of tokens of two prompts that are compared at first: most pairs of long ones differ
early."""

DIGITS = 32
"""Hexadecimal digits of a digest in a name."""

SUFFIX = ".safetensors"

_HEX = f"[0-9a-f]{{{DIGITS}}}"
_NAME = re.compile(rf"({_HEX})\.({_HEX})\.([0-9]{{1,9}})(?:\.({_HEX}))?\.safetensors")


def digest(*parts: bytes) -> str:
    """The parts' lengths count, so that no other division of the same bytes has this digest."""
    whole = sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.hexdigest()[:DIGITS]


def group_of(*parts: str) -> str:
    """The name for all files that one model, adapter and cache scope may use."""
    return digest(*(part.encode() for part in parts))


def common_length(a: Ids, b: Ids) -> int:
    """Returns the number of first tokens that are the same."""
    begin, end, shorter = 0, FIRST_COMPARED, min(len(a), len(b))
    while begin < shorter:
        differs = a[begin : min(end, shorter)] != b[begin : min(end, shorter)]
        if differs.any():
            return begin + int(differs.argmax())
        begin, end = end, end * 8
    return shorter


def may_share_more(a: Ids, b: Ids, length: int) -> bool:
    """Whether more than the first `length` tokens may be the same, judged from the next one."""
    return len(a) > length < len(b) and bool(a[length] == b[length])


def links_of(ids: Ids, block: int = BLOCK_TOKENS) -> list[str]:
    """The link before the first block, and the link of each whole block."""
    links = [digest(b"")]
    for begin in range(0, len(ids) - block + 1, block):
        links.append(digest(links[-1].encode(), ids[begin : begin + block].tobytes()))
    return links


@dataclass(frozen=True, slots=True)
class PromptFile:
    group: str
    link: str
    """The link of the block or, for a state, of the last whole block before it."""
    length: int
    """The number of tokens from the prompt's beginning to the end of what the file has."""
    tail: str = ""
    """A state's digest of the tokens after the last whole block; empty for a block."""

    @property
    def name(self) -> str:
        parts = (self.group, self.link, str(self.length), *filter(None, [self.tail]))
        return ".".join(parts) + SUFFIX


def parsed(name: str) -> PromptFile | None:
    """None for a name that no prompt cache file has."""
    found = _NAME.fullmatch(name)
    if not found:
        return None
    file = PromptFile(found[1], found[2], int(found[3]), found[4] or "")
    return file if file.name == name else None


def block_file(group: str, links: Sequence[str], at: int, block: int = BLOCK_TOKENS) -> PromptFile:
    """The file of the block with this number, from 0."""
    return PromptFile(group, links[at + 1], (at + 1) * block)


def state_file(
    group: str, links: Sequence[str], ids: Ids, length: int, block: int = BLOCK_TOKENS
) -> PromptFile:
    """The file of the state after `length` tokens."""
    whole = length // block
    tail = ids[whole * block : length]
    return PromptFile(group, links[whole], length, digest(links[whole].encode(), tail.tobytes()))
