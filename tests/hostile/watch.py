"""What Python opens, runs and starts in the meantime, by its audit hooks."""

import gc
import os
import socket
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

from mlx_server.grammars.compiled import CHILD
from mlx_server.system.sandbox import template_child

REPOSITORY = Path(__file__).parents[2]
PYTHON = {
    os.path.realpath(path)
    for path in (
        *(sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()),
        *(str(REPOSITORY / "mlx_server"), str(REPOSITORY / "tests")),
    )
}
SYSTEM = ("/proc/", "/sys/", "/dev/urandom", "/dev/null", "/usr/share/zoneinfo", "/etc/localtime")

LOOKS = frozenset({"open", "os.listdir", "os.scandir", "glob.glob", "os.chdir"})
STARTS = (
    *(
        "subprocess.",
        "os.exec",
        "os.fork",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "os.startfile",
    ),
    *("socket.", "urllib.", "pickle.find_class", "webbrowser."),
)
CHANGES = (
    *("os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir"),
    *("os.symlink", "os.truncate", "os.utime", "shutil.", "tempfile."),
)

_watches: list["Watch"] = []


class Watch:
    def __init__(self, folder: Path) -> None:
        self._folder = os.path.realpath(folder)
        others = set(threading.enumerate()) - {threading.current_thread()}
        self._others = {thread.ident for thread in others}
        """Threads of earlier tests, which may still write a file or end a process."""
        self.seen: set[str] = set()
        """Files of the folder that were opened."""
        self.wrong: list[str] = []

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if threading.get_ident() in self._others or _starts_warm_process(event, args):
            return
        if event in LOOKS:
            self._look(event, args)
        elif event == "exec" and isinstance(code := args[0], CodeType):
            if self._is_inside(code.co_filename) or not self._is_known(code.co_filename):
                self.wrong.append(f"exec {code.co_filename}")
        elif event == "ctypes.dlopen":
            if args[0] and not self._is_known(str(args[0])):
                self.wrong.append(f"{event} {args}")
        elif event.startswith((*STARTS, *CHANGES)):
            self.wrong.append(f"{event} {args}")

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        if isinstance(args[0], int) or args[0] is None:
            return
        name = os.fsdecode(args[0])
        if name.startswith("<"):  # for an error's text, Python looks for source that is no file
            return
        path = os.path.realpath(name)
        if event == "os.listdir" and path in map(os.path.realpath, sys.path):
            return  # the import system does so if a file was made there since its last look
        writes = event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        if self._is_inside(path) and not writes:
            self.seen.add(os.path.basename(path))
        elif writes or not self._is_known(path):
            self.wrong.append(f"{event} {path}")

    def _is_inside(self, path: str) -> bool:
        return Path(path).is_relative_to(self._folder)

    def _is_known(self, path: str) -> bool:
        """Python's own, or made by Python: `<template>`, `<string>`."""
        if path.startswith(("<", *SYSTEM)):
            return True
        return any(Path(os.path.realpath(path)).is_relative_to(root) for root in PYTHON)


def _starts_warm_process(event: str, args: tuple[Any, ...]) -> bool:
    """What that one may do is tested in tests/templates."""
    if event == "socket.__new__":
        return bool(args[1] == socket.AF_UNIX)
    if event == "open":
        return bool(args[0] == os.devnull)
    return event == "subprocess.Popen" and args[1][1:3] in (
        ["-I", template_child.__file__],
        ["-I", CHILD],
    )


def _hear(event: str, args: tuple[Any, ...]) -> None:
    for watch in _watches:
        watch.hear(event, args)


sys.addaudithook(_hear)  # for good: there is no way to take one off


@contextmanager
def watching(folder: Path) -> Iterator[Watch]:
    """Nothing outside of the folder may be looked at, nothing written, nothing run."""
    gc.collect()  # so that no finalizer of an earlier test's objects runs meanwhile
    watch = Watch(folder)
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.remove(watch)
    assert not watch.wrong, watch.wrong
