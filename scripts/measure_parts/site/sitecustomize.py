"""Writes down which functions of this project a server and its children run, if this folder is on
PYTHONPATH.

A byte at the head of a shared file numbers the stretch of time that is measured. Each function is
written down once a process and stretch, in the order of their first calls.
"""

import mmap
import os
import subprocess
import sys
import threading
from dis import get_instructions
from functools import cache
from inspect import CO_COROUTINE, CO_NEWLOCALS, CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER = Path(os.environ["MLX_WALKS"])
LIBRARY = os.environ["MLX_WALKS_LIBRARY"]
VARIABLES = ("MLX_WALKS", "MLX_WALKS_LIBRARY", "PYTHONPATH")


class _Tracer:
    def __init__(self) -> None:
        with (FOLDER / "stretch").open("rb") as file:
            self._stretch = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        # opened before a child enters its sandbox, which can write to pipes only
        self._calls = os.open(FOLDER / "calls", os.O_WRONLY)
        self._seen: dict[CodeType, int] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code, stretch = frame.f_code, self._stretch[0]
        if event != "call" or self._seen.get(code) == stretch or _goes_on(frame):
            return
        self._seen[code] = stretch
        is_function = code.co_flags & CO_NEWLOCALS and code.co_flags & CO_OPTIMIZED
        if is_function and code.co_filename.startswith(LIBRARY):
            line = f"{stretch} {code.co_filename.removeprefix(LIBRARY)} {code.co_name}\n"
            os.write(self._calls, line.encode())


def _goes_on(frame: FrameType) -> bool:
    """Whether a coroutine only passes on what it awaits. It is called again each time."""
    return bool(frame.f_code.co_flags & CO_COROUTINE) and frame.f_lasti > _start(frame.f_code)


@cache
def _start(code: CodeType) -> int:
    return next(each.offset for each in get_instructions(code) if each.opname == "RESUME")


def _trace_children() -> None:
    """Children get few variables, and Python's -I has them ignore those."""
    start = subprocess.Popen.__init__

    def traced(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        args = ["-P" if each == "-I" else each for each in args]
        if options.get("env") is not None:
            own = {name: os.environ[name] for name in VARIABLES}
            options["env"] = {**options["env"], **own}
        start(self, args, *rest, **options)

    subprocess.Popen.__init__ = traced  # type: ignore[method-assign]


tracer = _Tracer()
_trace_children()
threading.setprofile(tracer)
sys.setprofile(tracer)
