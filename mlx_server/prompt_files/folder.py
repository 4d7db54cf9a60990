"""The folder of prompt cache files: what is in it, what was used when, and its size on disk.

The files that follow a block of a prompt are listed in order of use: prompts differ after a common
beginning, so there may be thousands, and a lookup must not ask each of them.
"""

import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from mlx_server import limits
from mlx_server.prompt_files.contents import written
from mlx_server.prompt_files.names import (
    BLOCK_TOKENS,
    Ids,
    PromptFile,
    block_file,
    common_length,
    parsed,
    state_file,
)
from mlx_server.system.files import own_path

RECENT = 16
"""The number of files that are compared with a prompt that continues none of them: the latest ones
used."""


class NextFiles:
    def __init__(self, block_end: int) -> None:
        """block_end: the number of tokens up to the block's end."""
        self._block_end = block_end
        self._tails: dict[PromptFile, Ids | None] = {}
        """The tokens of each file after the block, if they are known: a name has their digest only.
        The last one was used last."""
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._tails)

    def add(self, file: PromptFile) -> None:
        self._tails[file] = None
        self._lengths[file.length] += 1

    def remove(self, file: PromptFile) -> None:
        del self._tails[file]
        self._lengths[file.length] -= 1
        if not self._lengths[file.length]:
            del self._lengths[file.length]

    def used(self, file: PromptFile) -> None:
        """Notes that a file was used just now."""
        self._tails[file] = self._tails.pop(file)

    def learn(self, file: PromptFile, tail: Ids) -> None:
        """Notes the tokens of a file after the block."""
        if file in self._tails:
            self._tails[file] = tail

    def states(self, most: int, state_of: Callable[[int], PromptFile]) -> Iterator[PromptFile]:
        """The states of a prompt's beginnings, the longest first. most: the prompt's length.
        state_of: the name of the state after so many tokens of the prompt."""
        for length in sorted(self._lengths, reverse=True):
            if length <= most and (file := state_of(length)) in self._tails:
                yield file

    def with_most(self, rest: Ids) -> tuple[PromptFile | None, int]:
        """The file that has most tokens of `rest`, which follow the block, and how many.

        Only the last used one may be read to find out: else each new prompt would read a file."""
        best, most = None, 0
        for at, (file, tail) in enumerate(islice(reversed(self._tails.items()), RECENT)):
            common = 0
            if tail is not None:
                common = common_length(tail, rest)
            elif at == 0:
                common = min(len(rest), file.length - self._block_end)
            if common > most:
                best, most = file, common
        return best, most


log = logging.getLogger("mlx_server.engine")

LOCK, DRAFT = "lock", ".draft"

DRAFT_NAME = re.compile(rf"[0-9a-f]{{16}}{re.escape(DRAFT)}")
"""Names of our own drafts: in a folder of the owner's choice other files may end like them."""

UNIT = 4096
"""Bytes in which disks count."""

RESERVE_BYTES = 1 << 30
"""Free space that is left to other programs."""

SCAN_SECONDS = 30.0

KEPT_SHARE = 0.95
"""The share of the limit that is kept when files have to be removed, so that this is rare."""


Place = tuple[str, str]
"""The place where a prompt goes on: its group, and the link of its last whole block."""


class FolderInUse(Exception):
    """Another engine uses the folder."""


@dataclass(slots=True)
class FileUse:
    nbytes: int
    """The bytes that the file takes on disk."""
    used: int
    """The time of its latest use, in nanoseconds since 1970."""
    place: Place | None = None
    """The place that it follows. A block's place is known once a prompt has shown it, as its name
    does not."""


@dataclass(frozen=True)
class FoundFiles:
    """The files that restore the longest prefix of a prompt."""

    length: int
    blocks: tuple[PromptFile, ...]
    state: PromptFile | None = None
    most: int = 0
    """The length that the files restore if the state's last tokens agree with the prompt, which its
    name can't tell."""

    @property
    def files(self) -> tuple[PromptFile, ...]:
        return (*self.blocks, *filter(None, [self.state]))


class PromptFolder:
    """The index of a folder. Several threads may use it."""

    def __init__(self, path: Path, most_bytes: int, block: int = BLOCK_TOKENS) -> None:
        self.path, self.most_bytes, self.block = path, most_bytes, block
        self._files: dict[PromptFile, FileUse] = {}
        self._next: dict[Place, NextFiles] = {}
        """The states and, where it is known what they follow, the blocks after each place."""
        self.nbytes = 0
        self._latest = 0
        """The time of the latest use of any file: later uses are later, also if the clock has been
        set back."""
        self._lock = threading.RLock()
        self._locked: int | None = None
        self._scanned = 0.0

    @property
    def count(self) -> int:
        return len(self._files)

    def __contains__(self, file: PromptFile) -> bool:
        return file in self._files

    def open(self) -> None:
        """Makes the folder, or reads what it has. Raises FolderInUse or OSError."""
        self.path = own_path(self.path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(self.path, 0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._locked = os.open(self.path / LOCK, flags, 0o600)
        try:
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise FolderInUse from None
        for draft in self.path.glob(f"*{DRAFT}"):
            if DRAFT_NAME.fullmatch(draft.name):
                draft.unlink(missing_ok=True)
        self.scan()
        self.make_room(0)

    def close(self) -> None:
        if self._locked is not None:
            os.close(self._locked)
            self._locked = None

    def scan(self) -> None:
        """Reads the folder again. Only the owner's regular files with the right names count. If the
        folder is gone, there are none."""
        found: list[tuple[PromptFile, os.stat_result]] = []
        foreign = 0
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                file = parsed(entry.name)
                with suppress(OSError):
                    about = entry.stat(follow_symlinks=False)
                    if file and stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
                        found.append((file, about))
                    else:
                        foreign += entry.name != LOCK and not DRAFT_NAME.fullmatch(entry.name)
        with self._lock:
            self._files, self._next, self.nbytes = {}, {}, 0
            for file, about in sorted(found, key=lambda each: each[1].st_mtime_ns):
                self._add(file, about, about.st_mtime_ns)
        if foreign:
            log.warning(
                "the prompt cache's folder has %d entries of other programs, which are ignored",
                foreign,
            )
        self._scanned = time.monotonic()

    def scan_again(self) -> None:
        """Notices from time to time what other programs have removed."""
        if time.monotonic() - self._scanned > SCAN_SECONDS:
            self.scan()

    def _add(self, file: PromptFile, found: os.stat_result, used: int) -> None:
        self._drop(file)
        place = (file.group, file.link) if file.tail else None
        self._files[file] = FileUse(found.st_blocks * 512, used, place)
        self._latest = max(self._latest, used)
        self.nbytes += found.st_blocks * 512
        if place:
            end = file.length - file.length % self.block
            self._next.setdefault(place, NextFiles(end)).add(file)

    def _now(self, step: int = 1) -> int:
        """The time in nanoseconds, at least `step` after all earlier uses."""
        with self._lock:
            self._latest = max(time.time_ns(), self._latest + step)
            return self._latest

    def _drop(self, file: PromptFile) -> None:
        if use := self._files.pop(file, None):
            self.nbytes -= use.nbytes
            if use.place:
                files = self._next[use.place]
                files.remove(file)
                if not files:
                    del self._next[use.place]

    def size_of(self, file: PromptFile) -> int:
        """The file's bytes on disk; 0 if there is none."""
        use = self._files.get(file)
        return use.nbytes if use else 0

    def place(self, file: PromptFile) -> Path:
        return self.path / file.name

    def longest(
        self, group: str, ids: Ids, links: Sequence[str], *, blocks: bool, states: bool
    ) -> FoundFiles | None:
        """The files for the longest prefix of `ids`. blocks: whether the model's caches have
        layers that can be cut back. states: whether they have others, so that they can be
        restored only where there is a state."""
        with self._lock:
            whole = [block_file(group, links, at, self.block) for at in range(len(links) - 1)]
            missing = (at for at, file in enumerate(whole) if file not in self._files)
            there = next(missing, len(whole)) if blocks else len(whole)
            for at in range(there, -1, -1):
                if state := next(self._matching(group, ids, links, at), None):
                    before, length = tuple(whole[:at]) if blocks else (), state.length
                    return FoundFiles(length, before, state, most=length)
                if not states:
                    return self._with_next(group, links[at], tuple(whole[:at]), ids)
        return None

    def _with_next(
        self, group: str, link: str, blocks: tuple[PromptFile, ...], ids: Ids
    ) -> FoundFiles | None:
        """The blocks and, of the files after them, the one that has most of the prompt: it can be
        cut back to where its tokens differ from the prompt's."""
        begin = blocks[-1].length if blocks else 0
        files = self._next.get((group, link))
        file, most = files.with_most(ids[begin:]) if files else (None, 0)
        if file:
            return FoundFiles(begin, blocks, file, most=begin + most)
        return FoundFiles(begin, blocks, most=begin) if blocks else None

    def note(self, group: str, ids: Ids, links: Sequence[str]) -> None:
        """Notes which blocks follow which, with their tokens: a prompt that differs within a block
        has its beginning there, and not its name."""
        with self._lock:
            for at, link in enumerate(links[:-1]):
                block = block_file(group, links, at, self.block)
                use, begin = self._files.get(block), at * self.block
                if use and use.place is None:
                    use.place = group, link
                    files = self._next.setdefault(use.place, NextFiles(begin))
                    files.add(block)
                    files.learn(block, ids[begin : block.length].copy())

    def learn_tail(self, file: PromptFile, tail: Ids) -> None:
        """Notes the tokens of a state after the last whole block."""
        with self._lock:
            if files := self._next.get((file.group, file.link)):
                files.learn(file, tail)

    def states_of(self, group: str, ids: Ids, links: Sequence[str]) -> list[PromptFile]:
        """The states of all prefixes of `ids`."""
        with self._lock:
            places = range(len(links))
            return [file for at in places for file in self._matching(group, ids, links, at)]

    def _matching(
        self, group: str, ids: Ids, links: Sequence[str], at: int
    ) -> Iterator[PromptFile]:
        """The longest first."""
        if files := self._next.get((group, links[at])):
            state_of = partial(state_file, group, links, ids, block=self.block)
            yield from files.states(len(ids), state_of)

    def write(self, file: PromptFile, pieces: Sequence[memoryview]) -> int:
        """Writes a file unless it is there, and removes others if they exceed the limit. Returns
        its bytes on disk. Raises OSError."""
        self.scan_again()
        if file in self:
            return 0
        nbytes = sum(piece.nbytes for piece in pieces)
        if nbytes + UNIT > self.most_bytes:
            return 0
        self.make_room(nbytes + UNIT)
        if shutil.disk_usage(self.path).free < nbytes + RESERVE_BYTES:
            raise OSError(f"less than {RESERVE_BYTES >> 30} GiB would be left free")
        draft = self.path / f"{secrets.token_hex(8)}{DRAFT}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        used = self._now()
        try:
            with os.fdopen(os.open(draft, flags, 0o600), "wb", buffering=0) as opened:
                for part in written(pieces):
                    _write_all(opened, part)
                found = os.fstat(opened.fileno())
            os.utime(draft, ns=(used, used), follow_symlinks=False)
            os.replace(draft, self.place(file))
        except BaseException:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        with self._lock:
            self._add(file, found, used)
        self.make_room(0)
        return found.st_blocks * 512

    def make_room(self, nbytes: int) -> None:
        """Removes the least recently used files until `nbytes` more are within the limits."""
        most_files = limits.PROMPT_FILES - bool(nbytes)
        with self._lock:
            if self.nbytes + nbytes <= self.most_bytes and self.count <= most_files:
                return
            most = int(self.most_bytes * KEPT_SHARE) - nbytes
            for file in sorted(self._files, key=lambda each: self._files[each].used):
                if self.nbytes <= most and self.count <= most_files * KEPT_SHARE:
                    break
                self.remove(file)

    def remove(self, file: PromptFile) -> None:
        with self._lock:
            with suppress(OSError):
                self.place(file).unlink(missing_ok=True)
            self._drop(file)

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
                    if use.place:
                        self._next[use.place].used(file)
            with suppress(OSError):
                os.utime(self.place(file), ns=(now, now - at * 1000), follow_symlinks=False)

    def by_group(self) -> dict[str, list[tuple[PromptFile, FileUse]]]:
        groups: dict[str, list[tuple[PromptFile, FileUse]]] = {}
        with self._lock:
            for file, use in self._files.items():
                groups.setdefault(file.group, []).append((file, use))
        return groups


def _write_all(opened: object, part: memoryview) -> None:
    while part:
        part = part[opened.write(part) :]  # type: ignore[attr-defined]
