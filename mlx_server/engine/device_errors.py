"""Classifies the errors of failed GPU commands, and whether a retry can help.

MLX raises them as RuntimeErrors, at the next point where it waits for the GPU or begins to encode:
later than the work that failed, and not always in the same step or model. Their text is that of
Metal's NSError (mlx/backend/metal), or CUDA's after the call (mlx/backend/cuda/utils.cpp).
"""

import re
from dataclasses import dataclass
from typing import Literal

DeviceErrorKind = Literal["out_of_memory", "timeout", "fault", "discarded", "lost", "peer"]

ENDS: frozenset[DeviceErrorKind] = frozenset({"lost", "peer"})
"""The kinds after which nothing more can be computed in this process."""

MESSAGES: dict[DeviceErrorKind, str] = {
    "out_of_memory": "the GPU's memory ran out",
    "timeout": "the system stopped the GPU's work because it took too long",
    "fault": "the GPU's work failed",
    "discarded": "the GPU's work was discarded because of another program's error",
    "lost": "the GPU accepts no more work from this process",
    "peer": "another machine of its group was lost",
}

_DEVICE = re.compile(
    r"\[METAL\]|\[metal::|CommandBuffer|MTL4?Command|\[Event::|\[Fence::|metal device|GPU|"
    r"(?-i:\bcu(da|dnn|blas)?[A-Z])\w{0,64}(\(.{0,200}\))? failed:",
    re.I,
)
"""Matches texts about the device, which a row's own values can't cause."""

_PEER = re.compile(r"^\[(ring|jaccl|mpi)\]")
"""Matches the errors of MLX's distributed backends."""

_KINDS: tuple[tuple[DeviceErrorKind, str], ...] = (
    (
        "lost",
        r"SubmissionsIgnored|prior/excessive GPU errors|Blacklisted|AccessRevoked|"
        r"DeviceRemoved|DeviceLost|device (was |has been )?(lost|removed|reset|disconnected)|"
        r"BackgroundExecutionNotPermitted|NotPermitted|"
        r"failed to make new command queue|unable to create new command buffer|"
        r"failed to load device|"
        # after these a CUDA context takes no more work
        r"illegal memory access|illegal instruction|misaligned address|device-side assert|"
        r"unspecified launch failure|launch timed out|uncorrectable|no CUDA-capable device",
    ),
    ("out_of_memory", r"OutOfMemory|out of memory|Insufficient Memory|unable to allocate"),
    ("timeout", r"ImpactingInteractivity|Impacting Interactivity|CallbackErrorTimeout|ErrorTimeout"
     r"|Timeout Error|timed out|CallbackErrorHang|GPU Hang"),
    ("discarded", r"InnocentVictim|victim of GPU error"),
    ("fault", r"PageFault|Address Fault|StackOverflow|InvalidResource|Command ?buffer execution "
     r"failed|CommandBuffer\w{0,64}Error|Execution of the command buffer was aborted"),
)  # fmt: skip
_MATCHES = tuple((kind, re.compile(pattern, re.I)) for kind, pattern in _KINDS)

_ALLOCATION = re.compile(r"\[(\w+::)?malloc\w*\] unable to allocate|std::bad_alloc", re.I)
"""Matches allocation errors that MLX raises before it submits any work to the device."""

FORGIVEN_SECONDS = 60.0
"""Errors further apart than this do not count as consecutive if a row finished in between."""


def device_error(error: BaseException) -> DeviceErrorKind | None:
    """Returns None for any other error, which concerns only the rows that raised it."""
    if not isinstance(error, RuntimeError | MemoryError):
        return None
    return kind_of(str(error))


def kind_of(text: str) -> DeviceErrorKind | None:
    if _ALLOCATION.search(text):
        return "out_of_memory"
    if _PEER.search(text):
        return "peer"
    if not _DEVICE.search(text):
        return None
    return next((kind for kind, pattern in _MATCHES if pattern.search(text)), None)


@dataclass
class Streak:
    """Counts consecutive device errors."""

    length: int = 0
    _last: float = 0.0
    _answered: bool = False

    def answered(self) -> None:
        """Notes that a row has finished."""
        self._answered = True

    def failed(self, now: float) -> int:
        forgiven = self._answered and now - self._last > FORGIVEN_SECONDS
        self.length = 1 if forgiven else self.length + 1
        self._last, self._answered = now, False
        return self.length
