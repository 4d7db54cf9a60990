"""The files of the prompt cache's tier on disk: their names, their contents and their folder.

Nothing here uses MLX, so that `mlx-server cache` can look at the folder without an engine.

A prompt is cut into blocks of tokens. The link of a block is the digest of the link before it and
of the block's tokens, so it stands for all tokens up to the block's end, and prompts that begin
alike share the files of their common blocks. A state file has the tokens after the last whole
block, and what can't be cut back, after a number of tokens that need not end a block.

A file is safetensors, whose last tensor is a checksum of the rest. It may be damaged, or made by
another program. It is read only if its checksum, its name and its tokens are right, and nothing in
it decides which class is made or how much is read.
"""

import fcntl
import json
import logging
import os
import re
import shutil
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_server import limits
from mlx_server.models.files import SIZES, BadHeader, read_header
from mlx_server.system.daily_bytes import FILE as WRITTEN
from mlx_server.system.daily_bytes import DailyBytes
from mlx_server.system.files import LOCKED, create_locked, lock_within, own_path, remove_abandoned

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

    def begin(self, block: int) -> int:
        """Returns the number of tokens before those that only this file has."""
        return self.length - (self.length % block if self.tail else block)


def parsed(name: str) -> PromptFile | None:
    """None for a name that no prompt cache file has."""
    match = _NAME.fullmatch(name)
    if not match:
        return None
    file = PromptFile(match[1], match[2], int(match[3]), match[4] or "")
    return file if file.name == name else None


class PromptNames:
    """The files of one prompt, by name."""

    def __init__(self, group: str, ids: Ids, block: int = BLOCK_TOKENS) -> None:
        self.group, self.ids, self._block = group, ids, block
        self._links = [digest(b"")]
        """The link before the first block, and the link of each whole block."""
        for begin in range(0, len(ids) - block + 1, block):
            tokens = ids[begin : begin + block].tobytes()
            self._links.append(digest(self._links[-1].encode(), tokens))

    @property
    def blocks(self) -> list[PromptFile]:
        ends = enumerate(self._links[1:], 1)
        return [PromptFile(self.group, link, number * self._block) for number, link in ends]

    def link(self, blocks: int) -> str:
        """Returns the link of the last of so many blocks."""
        return self._links[blocks]

    def state(self, length: int) -> PromptFile:
        """Returns the file of the state after `length` tokens."""
        blocks = length // self._block
        link, tail = self._links[blocks], self.ids[blocks * self._block : length]
        return PromptFile(self.group, link, length, digest(link.encode(), tail.tobytes()))


CHECKSUM, TOKENS = "checksum", "tokens"
CHECKSUM_BYTES = sha256().digest_size

HEADER_BYTES = 1 << 20
"""A larger header is a damaged one: real ones have some 100 bytes for each array of a layer."""

PIECE_BYTES = 8 << 20
"""The bytes that are read, hashed and written at a time."""

WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Stands in for a tensor's type by the size of its items: NumPy has no bfloat16."""

Tensors = dict[str, tuple[str, NDArray[Any]]]
"""The dtype of each tensor, by safetensors' name, and its items as unsigned numbers."""


class DamagedFile(Exception):
    """The file can't be used. The message continues a sentence that begins with the file."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    dtype: str
    """The dtype by safetensors' name."""
    shape: tuple[int, ...]
    data: memoryview
    """The bytes in C order."""


def encoded(
    file: PromptFile, ids: Ids, model: str, tensors: Mapping[str, RawTensor]
) -> list[memoryview]:
    """Returns the file in pieces. ids: the tokens that only this file stands for. model: its id,
    for `mlx-server cache`."""
    own = memoryview(ids.tobytes())
    every = {**tensors, TOKENS: RawTensor("U32", (len(ids),), own)}
    header: dict[str, Any] = {"__metadata__": {"file": file.name, "model": model}}
    end = 0
    for name, tensor in every.items():
        begin, end = end, end + tensor.data.nbytes
        entry = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
        header[name] = entry
    last = [end, end + CHECKSUM_BYTES]
    header[CHECKSUM] = {"dtype": "U8", "shape": [CHECKSUM_BYTES], "data_offsets": last}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    return [memoryview(start), *(tensor.data for tensor in every.values())]


def written(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yields the pieces in sizes to write at a time, and their checksum."""
    whole = sha256()
    for piece in pieces:
        flat = piece.cast("B")
        for begin in range(0, flat.nbytes, PIECE_BYTES):
            part = flat[begin : begin + PIECE_BYTES]
            whole.update(part)
            yield part
    yield memoryview(whole.digest())


def read(path: Path, file: PromptFile, most_bytes: int) -> tuple[Tensors, Ids]:
    """Reads and checks a file; returns its tensors, and the tokens that only it stands for. Raises
    DamagedFile, or OSError."""
    data = _checked_bytes(path, most_bytes)
    try:
        header = read_header(BytesIO(data), len(data), HEADER_BYTES)
    except BadHeader as error:
        raise DamagedFile(str(error)) from None
    if header.metadata.get("file") != file.name:
        raise DamagedFile("is not the file that its name says")
    tensors: Tensors = {}
    for name, tensor in header.tensors.items():
        width = WIDTHS[SIZES[tensor.dtype]]
        items = np.frombuffer(data, width, prod(tensor.shape), tensor.begin)
        tensors[name] = tensor.dtype, items.reshape(tensor.shape)
    tensors.pop(CHECKSUM, None)
    dtype, ids = tensors.pop(TOKENS, ("", np.empty(0)))
    if dtype != "U32" or ids.ndim != 1:
        raise DamagedFile("does not say which tokens it is for")
    return tensors, ids


def model_in(path: Path) -> str | None:
    """Returns the id of the model that made the file; None if the file does not say. Raises
    OSError."""
    with _opened(path) as opened:
        try:
            header = read_header(opened, os.fstat(opened.fileno()).st_size, HEADER_BYTES)
        except BadHeader:
            return None
    model = header.metadata.get("model")
    return model if isinstance(model, str) else None


def _opened(path: Path) -> Any:
    """Opens a regular file of our own and no link; a pipe would keep its reader waiting for ever.
    Another user may know the tokens of a prompt, and so how to name a file for them."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    opened = os.fdopen(os.open(path, flags), "rb", buffering=0)
    if _is_own(os.fstat(opened.fileno())):
        return opened
    opened.close()
    raise DamagedFile("is not a regular file of this user")


def _is_own(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _checked_bytes(path: Path, most_bytes: int) -> bytearray:
    with _opened(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        if not CHECKSUM_BYTES < size <= most_bytes:
            raise DamagedFile(f"has {size:,} bytes")
        data, whole = bytearray(size), sha256()
        view, summed = memoryview(data), size - CHECKSUM_BYTES
        done = 0
        while done < size:
            count = opened.readinto(view[done : done + PIECE_BYTES])
            if not count:
                raise DamagedFile("is cut short")
            whole.update(view[min(done, summed) : min(done + count, summed)])
            done += count
    if whole.digest() != data[summed:]:
        raise DamagedFile("has a wrong checksum")
    return data


log = logging.getLogger("mlx_server.engine")

LOCK, DRAFT = "lock", ".draft"
"""The folder's lock, and the ending of a file that is being written."""

UNIT = 4096
"""Bytes in which disks count."""

RESERVE_BYTES = 1 << 30
"""Free space that is left to other programs."""

SCAN_PAUSE = 20
"""How much longer than the latest scan the time before the next one is, at least."""

LOCK_SECONDS = 0.05
"""How long a server waits until others have read what it would remove."""

KEPT_SHARE = 0.95
"""The share of the limit that is kept when files have to be removed, so that this is rare."""


@dataclass(slots=True)
class FileUse:
    nbytes: int
    """The bytes that the file takes on disk."""
    used: int
    """The time of its latest use, in nanoseconds since 1970."""


class PromptFolder:
    """The index of a folder: its files, when they were used, and their size on disk. Several
    threads may use it, and several servers may use the folder. Each file has one writer, and none
    is removed to make room while a server reads some."""

    def __init__(
        self,
        path: Path,
        most_bytes: int,
        block: int = BLOCK_TOKENS,
        writes_per_day: int = limits.PROMPT_WRITES_PER_DAY,
    ) -> None:
        self.path, self.most_bytes, self.block = path, most_bytes, block
        self._files: dict[PromptFile, FileUse] = {}
        self._lengths: dict[tuple[str, str], Counter[int]] = {}
        """The lengths of the states after each block, by their group and the block's link. There
        may be thousands of states after one, and a lookup must not ask each of them."""
        self.nbytes = 0
        self.written = 0
        """The bytes that all writes took on disk."""
        self._latest = 0
        """The time of the latest use of any file: later uses are later, also if the clock has been
        set back."""
        self._writes_per_day = writes_per_day
        self._lock = threading.RLock()
        self._seen = 0
        """The folder's time of change, as of the latest scan or change of our own."""
        self._next_scan = 0.0

    @property
    def count(self) -> int:
        return len(self._files)

    def __contains__(self, file: PromptFile) -> bool:
        return file in self._files

    def open(self) -> None:
        """Makes the folder, or reads what it has. Raises OSError."""
        self.path = own_path(self.path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(self.path, 0o700)
        with self.reading():  # fails now, rather than later, on a file system without locks
            self.remove_drafts()
            self.scan()
        self.make_room(0)

    def remove_drafts(self) -> None:
        """Removes what killed servers have half written."""
        for draft in self.path.glob(f"*{DRAFT}"):
            if _is_draft(draft.name):
                with suppress(OSError):
                    remove_abandoned(draft)

    @property
    def is_stale(self) -> bool:
        """Whether others have changed the folder since it was read, and it may be read again."""
        return time.monotonic() >= self._next_scan and self._changed() != self._seen

    def refresh(self) -> None:
        if self.is_stale:
            self.scan()

    def _changed(self) -> int:
        with suppress(OSError):
            return self.path.stat().st_mtime_ns
        return 0

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """A change of our own to the folder, which does not make the index stale."""
        with self._lock:
            was_known = self._changed() == self._seen
            yield
            if was_known:
                self._seen = self._changed()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keeps other servers from removing files meanwhile."""
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextmanager
    def _locked(self, how: int) -> Iterator[bool]:
        lock = os.open(self.path / LOCK, LOCKED, 0o600)
        try:
            yield lock_within(LOCK_SECONDS, lock, how)
        finally:
            os.close(lock)

    def scan(self) -> None:
        """Reads the folder again. Only the owner's regular files with the right names count. If the
        folder is gone, there are none."""
        own: list[tuple[PromptFile, os.stat_result]] = []
        foreign = 0
        began, changed = time.monotonic(), self._changed()
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                file = parsed(entry.name)
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if file and _is_own(status):
                        own.append((file, status))
                    else:
                        foreign += entry.name not in (LOCK, WRITTEN) and not _is_draft(entry.name)
        with self._lock:
            self._files, self._lengths, self.nbytes = {}, {}, 0
            for file, status in sorted(own, key=lambda each: each[1].st_mtime_ns):
                self._add(file, status, status.st_mtime_ns)
            self._seen = changed
        if foreign and not self._next_scan:
            log.warning(
                "the prompt cache's folder has %d entries of other programs, which are ignored",
                foreign,
            )
        now = time.monotonic()
        self._next_scan = now + SCAN_PAUSE * (now - began)

    def _add(self, file: PromptFile, status: os.stat_result, used: int) -> None:
        self._drop(file)
        self._files[file] = FileUse(status.st_blocks * 512, used)
        self._latest = max(self._latest, used)
        self.nbytes += status.st_blocks * 512
        if file.tail:
            self._lengths.setdefault((file.group, file.link), Counter())[file.length] += 1

    def _drop(self, file: PromptFile) -> None:
        if use := self._files.pop(file, None):
            self.nbytes -= use.nbytes
            if file.tail:
                lengths = self._lengths[file.group, file.link]
                lengths[file.length] -= 1
                lengths += Counter()  # removes what has become zero
                if not lengths:
                    del self._lengths[file.group, file.link]

    def _now(self, step: int = 1) -> int:
        """Returns the time in nanoseconds, at least `step` after all earlier uses."""
        with self._lock:
            self._latest = max(time.time_ns(), self._latest + step)
            return self._latest

    def size_of(self, file: PromptFile) -> int:
        """Returns the file's bytes on disk; 0 if there is none."""
        use = self._files.get(file)
        return use.nbytes if use else 0

    def place(self, file: PromptFile) -> Path:
        return self.path / file.name

    def names(self, group: str, ids: Ids) -> PromptNames:
        return PromptNames(group, ids, self.block)

    def longest(self, names: PromptNames, *, blocks: bool, states: bool) -> list[PromptFile]:
        """Returns the files for the longest prefix of the prompt. blocks: whether the model's
        caches have layers that can be cut back. states: whether they have others, so that they can
        be restored only where there is a state."""
        with self._lock:
            whole = names.blocks
            missing = (at for at, file in enumerate(whole) if file not in self._files)
            there = next(missing, len(whole)) if blocks else len(whole)
            for count in range(there, -1, -1):
                before = whole[:count] if blocks else []
                if state := next(self._states(names, count), None):
                    return [*before, state]
                if not states:
                    return before
        return []

    def find(self, names: PromptNames) -> None:
        """Adds the prompt's first blocks that other servers have written since the latest scan."""
        all(file in self or self._is_there(file) for file in names.blocks)

    def states_of(self, names: PromptNames) -> list[PromptFile]:
        """Returns the states of all prefixes of the prompt."""
        with self._lock:
            places = range(len(names.blocks) + 1)
            return [state for count in places for state in self._states(names, count)]

    def _states(self, names: PromptNames, blocks: int) -> Iterator[PromptFile]:
        """Yields the states after so many blocks, the longest first."""
        lengths = self._lengths.get((names.group, names.link(blocks)), ())
        for length in sorted(lengths, reverse=True):
            if length <= len(names.ids) and (state := names.state(length)) in self._files:
                yield state

    def write(self, file: PromptFile, pieces: Sequence[memoryview]) -> None:
        """Writes a file unless it is there or another server writes it, and removes others if they
        exceed the limit. Raises OSError."""
        self.refresh()
        nbytes = sum(piece.nbytes for piece in pieces)
        if file in self or nbytes + UNIT > self.most_bytes or self._is_there(file):
            return
        if not self.make_room(nbytes + UNIT):
            return
        if shutil.disk_usage(self.path).free < nbytes + RESERVE_BYTES:
            raise OSError(f"less than {RESERVE_BYTES >> 30} GiB would be left free")
        draft = self.path / f"{file.name}{DRAFT}"
        remove_abandoned(draft)
        try:
            with self._changing():
                descriptor = create_locked(draft)
        except FileExistsError:
            return
        used = self._now()
        with os.fdopen(descriptor, "wb", buffering=0) as opened:
            try:
                self._count(nbytes)
                for part in written(pieces):
                    write_all(opened, part)
                status = os.fstat(descriptor)
                os.utime(draft, ns=(used, used), follow_symlinks=False)
                with self._changing():
                    os.replace(draft, self.place(file))
            except BaseException:
                with suppress(OSError):
                    draft.unlink(missing_ok=True)
                raise
        with self._lock:
            self._add(file, status, used)
            self.written += status.st_blocks * 512
        self.make_room(0)

    def _is_there(self, file: PromptFile) -> bool:
        """Whether another server has written the file since the folder was read."""
        with suppress(OSError):
            status = self.place(file).lstat()
            if _is_own(status):
                with self._lock:
                    self._add(file, status, status.st_mtime_ns)
                return True
        return False

    def _count(self, nbytes: int) -> None:
        if not DailyBytes(self.path, self._writes_per_day).take(nbytes):
            raise OSError(
                f"{self._writes_per_day / 1e9:g} GB were written today, which is "
                "`disk_writes_per_day` under `prompt_cache`"
            )

    def make_room(self, nbytes: int) -> bool:
        """Removes the least recently used files until `nbytes` more are within the limits. Returns
        whether there is room now: a server may be reading."""
        most_files = limits.PROMPT_FILES - bool(nbytes)
        if self.nbytes + nbytes <= self.most_bytes and self.count <= most_files:
            return True
        with self._locked(fcntl.LOCK_EX) as is_alone:
            if not is_alone:
                return False
            self.scan()  # other servers may have used or removed files
            most = int(self.most_bytes * KEPT_SHARE) - nbytes
            with self._lock:
                for file in self.by_use():
                    if self.nbytes <= most and self.count <= most_files * KEPT_SHARE:
                        break
                    self.remove(file)
        return True

    def by_use(self) -> list[PromptFile]:
        """Returns the files, the least recently used one first."""
        return sorted(self._files, key=lambda file: self._files[file].used)

    def remove(self, file: PromptFile) -> None:
        with self._changing():
            with suppress(OSError):
                self.place(file).unlink(missing_ok=True)
            self._drop(file)

    def remove_unread(self, files: Sequence[PromptFile]) -> None:
        """Removes files that are superfluous, unless a server reads some."""
        if files:
            with self._locked(fcntl.LOCK_EX) as is_alone:
                for file in files if is_alone else ():
                    self.remove(file)

    def remove_if(self, is_unwanted: Callable[[PromptFile], bool]) -> None:
        with self._lock:
            for file in [file for file in self._files if is_unwanted(file)]:
                self.remove(file)

    def touch(self, files: Sequence[PromptFile]) -> None:
        """Notes that files were used. Of files used at once the last is removed first: no block is
        of use without those before it."""
        now = self._now(1 + len(files) * 1000)
        for at, file in enumerate(files):
            with self._lock:
                if use := self._files.get(file):
                    use.used = now - at * 1000
            with suppress(OSError):
                os.utime(self.place(file), ns=(now, now - at * 1000), follow_symlinks=False)

    def by_group(self) -> dict[str, list[tuple[PromptFile, FileUse]]]:
        groups: dict[str, list[tuple[PromptFile, FileUse]]] = {}
        with self._lock:
            for file, use in self._files.items():
                groups.setdefault(file.group, []).append((file, use))
        return groups


def _is_draft(name: str) -> bool:
    """In a folder of the owner's choice other files may end like drafts."""
    return name.endswith(DRAFT) and parsed(name.removesuffix(DRAFT)) is not None


def write_all(opened: Any, part: memoryview) -> None:
    while part:
        part = part[opened.write(part) :]
