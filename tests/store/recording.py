"""Every write and sync that SQLite makes, in order, and the disk that a power cut would leave.

The VFS of the very SQLite that Python uses is replaced by one that writes down and then does the
same, so a store that is recorded runs as it always does.
"""

import ctypes
import random
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_int, c_int64, c_void_p, cast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

SECTOR = 512

JOURNAL = 0x800 | 0x80000
"""SQLITE_OPEN_MAIN_JOURNAL and _WAL: with its first sync, a new one's folder is synced too."""

RECORDED = JOURNAL | 0x100  # and SQLITE_OPEN_MAIN_DB

Open = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, POINTER(c_int))
Delete = CFUNCTYPE(c_int, c_void_p, c_char_p, c_int)
Write = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
Truncate = CFUNCTYPE(c_int, c_void_p, c_int64)
Sync = CFUNCTYPE(c_int, c_void_p, c_int)


class Vfs(Structure):
    _fields_ = (
        ("version", c_int),
        ("file_size", c_int),
        ("max_path", c_int),
        ("next", c_void_p),
        ("name", c_char_p),
        ("data", c_void_p),
        ("open", Open),
        ("delete", Delete),
        ("others", c_void_p * 13),
    )


class Methods(Structure):
    _fields_ = (
        ("version", c_int),
        ("close", c_void_p),
        ("read", c_void_p),
        ("write", Write),
        ("truncate", Truncate),
        ("sync", Sync),
        ("others", c_void_p * 13),
    )


class File(Structure):
    _fields_ = (("methods", POINTER(Methods)),)


@dataclass(frozen=True)
class Event:
    """`inode` is a file, whatever its name then and later."""

    what: Literal["create", "write", "truncate", "sync", "sync folder", "delete", "note"]
    inode: int = -1
    name: str = ""
    offset: int = 0
    data: bytes = b""


@dataclass
class Recording:
    log: list[Event] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)
    _files: dict[int, int] = field(default_factory=dict)
    _unsynced_journals: set[int] = field(default_factory=set)
    _keep: list[Any] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.log.append(Event("note", name=text))

    def opened(self, name: str, file: int, flags: int) -> None:
        if name not in self._names:
            inode = self._names[name] = len(self.log)
            self.log.append(Event("create", inode, name))
            if flags & JOURNAL:
                self._unsynced_journals.add(inode)
        self._files[file] = self._names[name]

    def deleted(self, name: str) -> None:
        if name in self._names:
            self.log.append(Event("delete", self._names.pop(name), name))

    def written(self, file: int, offset: int, data: bytes) -> None:
        self.log.append(Event("write", self._files[file], offset=offset, data=data))

    def truncated(self, file: int, size: int) -> None:
        self.log.append(Event("truncate", self._files[file], offset=size))

    def synced(self, file: int) -> None:
        inode = self._files[file]
        self.log.append(Event("sync", inode))
        if inode in self._unsynced_journals:
            self._unsynced_journals.remove(inode)
            self.log.append(Event("sync folder"))


def library() -> ctypes.CDLL | None:
    """SQLite as the module `sqlite3` has it; None if it is hidden in the interpreter."""
    import _sqlite3

    found = ctypes.CDLL(getattr(_sqlite3, "__file__", None))
    if not hasattr(found, "sqlite3_vfs_register"):
        return None
    found.sqlite3_vfs_find.restype = POINTER(Vfs)
    found.sqlite3_vfs_find.argtypes = [c_char_p]
    found.sqlite3_vfs_register.argtypes = [POINTER(Vfs), c_int]
    found.sqlite3_vfs_unregister.argtypes = [POINTER(Vfs)]
    return found


@contextmanager
def recorded(sqlite: ctypes.CDLL) -> Iterator[Recording]:
    """For connections that are opened and closed within."""
    recording = Recording()
    usual = sqlite.sqlite3_vfs_find(None)
    vfs = Vfs.from_buffer_copy(usual.contents)
    vfs.name = b"recording"
    vfs.open = Open(lambda *call: _open(recording, usual.contents, *call))
    vfs.delete = Delete(lambda *call: _delete(recording, usual.contents, *call))
    sqlite.sqlite3_vfs_register(byref(vfs), 1)
    try:
        yield recording
    finally:
        sqlite.sqlite3_vfs_unregister(byref(vfs))
        sqlite.sqlite3_vfs_register(usual, 1)


def _open(
    recording: Recording, usual: Vfs, vfs: int, name: int | None, file: int, flags: int, out: Any
) -> int:
    code = int(usual.open(vfs, name, file, flags, out))
    if code == sqlite3.SQLITE_OK and name and flags & RECORDED:
        recording.opened(Path(ctypes.string_at(name).decode()).name, file, flags)
        opened = cast(file, POINTER(File)).contents
        methods = _methods(recording, opened.methods.contents)
        recording._keep.append(methods)
        opened.methods = ctypes.pointer(methods)
    return code


def _delete(recording: Recording, usual: Vfs, vfs: int, name: bytes, sync: int) -> int:
    recording.deleted(Path(name.decode()).name)
    return int(usual.delete(vfs, name, sync))


def _methods(recording: Recording, usual: Methods) -> Methods:
    def write(file: int, data: int, size: int, offset: int) -> int:
        recording.written(file, offset, ctypes.string_at(data, size))
        return int(usual.write(file, data, size, offset))

    def truncate(file: int, size: int) -> int:
        recording.truncated(file, size)
        return int(usual.truncate(file, size))

    def sync(file: int, flags: int) -> int:
        code = int(usual.sync(file, flags))
        recording.synced(file)
        return code

    ours = Methods.from_buffer_copy(usual)
    ours.write, ours.truncate, ours.sync = Write(write), Truncate(truncate), Sync(sync)
    recording._keep.append(usual)
    return ours


@dataclass
class Disk:
    """What is on it for certain, and what is on its way, in no order."""

    names: dict[str, int] = field(default_factory=dict)
    synced_names: dict[str, int] = field(default_factory=dict)
    synced: dict[int, bytearray] = field(default_factory=dict)
    pending: dict[int, list[Event]] = field(default_factory=dict)

    def do(self, event: Event) -> None:
        match event.what:
            case "create":
                self.names[event.name] = event.inode
                self.synced[event.inode] = bytearray()
                self.pending[event.inode] = []
            case "delete":
                self.names.pop(event.name, None)
            case "write" | "truncate":
                self.pending[event.inode].append(event)
            case "sync":
                for done in self.pending[event.inode]:
                    _apply(self.synced[event.inode], done)
                self.pending[event.inode] = []
            case "sync folder":
                self.synced_names = dict(self.names)
            case "note":
                pass

    def after_power_cut(self, rng: random.Random) -> dict[str, bytes]:
        """Of what was not synced nothing, some writes or some sectors are there, by chance."""
        names = rng.choice([self.names, self.synced_names])
        survive = rng.choice([_nothing, _some_writes, _some_sectors])
        files = {}
        for name, inode in names.items():
            content = bytearray(self.synced[inode])
            for event in survive(self.pending[inode], rng):
                _apply(content, event)
            files[name] = bytes(content)
        return files


def _apply(content: bytearray, event: Event) -> None:
    end = event.offset + len(event.data)
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    if event.what == "truncate":
        del content[event.offset :]
    else:
        content[event.offset : end] = event.data


def _nothing(pending: list[Event], rng: random.Random) -> list[Event]:
    return []


def _some_writes(pending: list[Event], rng: random.Random) -> list[Event]:
    return [event for event in pending if rng.random() < 0.5]


def _some_sectors(pending: list[Event], rng: random.Random) -> list[Event]:
    return _some_writes([part for event in pending for part in _sectors(event)], rng)


def _sectors(event: Event) -> Iterator[Event]:
    """Cut where the disk's sectors end, which is not where the write begins."""
    if event.what == "truncate":
        yield event
        return
    start, end = event.offset, event.offset + len(event.data)
    while start < end:
        stop = min(end, (start // SECTOR + 1) * SECTOR)
        part = event.data[start - event.offset : stop - event.offset]
        yield Event("write", event.inode, offset=start, data=part)
        start = stop
