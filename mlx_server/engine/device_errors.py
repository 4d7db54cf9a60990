"""What a failed GPU command says, and whether another try can help.

MLX (mlx/backend/metal) raises it as a RuntimeError, with the text of Metal's NSError, at the next
point where it waits for the GPU or begins to encode: later than the work that failed, and not
always in the same step or model.
"""

import re
from dataclasses import dataclass
from typing import Literal

DeviceErrorKind = Literal["out_of_memory", "timeout", "fault", "discarded", "lost"]

ENDS: frozenset[DeviceErrorKind] = frozenset({"lost"})
"""No command of this process is run any more."""

MESSAGES: dict[DeviceErrorKind, str] = {
    "out_of_memory": "its memory ran out",
    "timeout": "the system stopped the GPU's work because it took too long",
    "fault": "the GPU's work failed",
    "discarded": "the GPU's work was discarded because of another program's error",
    "lost": "the GPU takes no more work from this process",
}

_METAL = re.compile(
    r"\[METAL\]|\[metal::|CommandBuffer|MTL4?Command|\[Event::|\[Fence::|metal device|GPU", re.I
)
"""Whether the text is about the device at all: that a row's own values can't cause."""

_KINDS: tuple[tuple[DeviceErrorKind, str], ...] = (
    (
        "lost",
        r"SubmissionsIgnored|prior/excessive GPU errors|Blacklisted|AccessRevoked|"
        r"DeviceRemoved|DeviceLost|device (was |has been )?(lost|removed|reset|disconnected)|"
        r"BackgroundExecutionNotPermitted|NotPermitted|"
        r"failed to make new command queue|unable to create new command buffer|"
        r"failed to load device",
    ),
    ("out_of_memory", r"OutOfMemory|out of memory|Insufficient Memory|unable to allocate"),
    ("timeout", r"ImpactingInteractivity|Impacting Interactivity|CallbackErrorTimeout|ErrorTimeout"
     r"|Timeout Error|timed out|CallbackErrorHang|GPU Hang"),
    ("discarded", r"InnocentVictim|victim of GPU error"),
    ("fault", r"PageFault|Address Fault|StackOverflow|InvalidResource|Command ?buffer execution "
     r"failed|CommandBuffer\w*Error|Execution of the command buffer was aborted"),
)  # fmt: skip
_MATCHES = tuple((kind, re.compile(pattern, re.I)) for kind, pattern in _KINDS)

_ALLOCATION = re.compile(r"\[(\w+::)?malloc\w*\] unable to allocate|std::bad_alloc", re.I)
"""By MLX before any work was given to the device."""

FORGIVEN_SECONDS = 60.0
"""Errors so far apart are not in a row, if something was answered in between."""


def device_error(error: BaseException) -> DeviceErrorKind | None:
    """None: an error like any other, of the rows that it was raised for."""
    if not isinstance(error, RuntimeError | MemoryError):
        return None
    return kind_of(str(error))


def kind_of(text: str) -> DeviceErrorKind | None:
    if _ALLOCATION.search(text):
        return "out_of_memory"
    if not _METAL.search(text):
        return None
    return next((kind for kind, pattern in _MATCHES if pattern.search(text)), None)


@dataclass
class Streak:
    """How many device errors there were in a row."""

    length: int = 0
    _last: float = 0.0
    _answered: bool = False

    def answered(self) -> None:
        """A row came to its end."""
        self._answered = True

    def failed(self, now: float) -> int:
        forgiven = self._answered and now - self._last > FORGIVEN_SECONDS
        self.length = 1 if forgiven else self.length + 1
        self._last, self._answered = now, False
        return self.length
