"""The memory that weights and caches may take together, and the memory that a process takes."""

import ctypes
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

WORKING_BYTES, WORKING_SHARE = 250 << 20, 0.05
"""Memory that the default budget leaves to the computation: the activations of the longest prefill
chunk (0.1 to 0.6 GB with commonly used models), and the second copy of a layer's cache while it
grows, while a row joins or leaves a batch, and while a prompt is put into the prompt cache. The
table in tests/pool/test_memory.py has the measurements."""

SHARE_OF_RAM = 0.75
"""The share of RAM that takes the place of Metal's recommendation where there is no Metal."""


@dataclass(frozen=True)
class MemoryBudget:
    nbytes: int
    recommended: int
    """Metal's recommended working set, or most of an NVIDIA GPU's memory, in bytes; without a GPU,
    a share of the RAM."""
    gpu: bool
    chosen: bool
    """Whether `memory_budget` in models.yaml sets it."""
    others: int = 0
    """The bytes that other servers of the data directory take."""

    @property
    def mlx_limit(self) -> int:
        """The limit for MLX in bytes, above which it waits for running work and keeps no freed
        buffers."""
        return self.nbytes if self.chosen else max(self.nbytes, self.recommended - self.others)

    @property
    def source(self) -> str:
        """The origin of the budget, and how to change a default one."""
        change = "" if self.chosen else "; change it with `memory_budget` in models.yaml"
        return self.origin + change

    @property
    def origin(self) -> str:
        others = f", minus {size(self.others)} of other servers" if self.others else ""
        return self._whole + others

    @property
    def _whole(self) -> str:
        if self.chosen:
            return "set by `memory_budget` in models.yaml"
        whole = "the GPU's recommended working set" if self.gpu else "three quarters of RAM"
        working = size(self.recommended - default_budget(self.recommended))
        return f"{whole} ({size(self.recommended)}) minus {working} to compute in"

    @property
    def warning(self) -> str | None:
        """The log line for a budget that is larger than recommended; else None."""
        if self.nbytes <= self.recommended:
            return None
        whole = "are recommended for this GPU" if self.gpu else "make three quarters of RAM"
        return (
            f"The memory budget of {size(self.nbytes)} is more than the {size(self.recommended)} "
            f"that {whole}: when it is used up, the system may swap or kill programs. Lower "
            "`memory_budget` in models.yaml."
        )


def memory_budget(chosen: int | None, recommended: int | None, others: int = 0) -> MemoryBudget:
    """The budget of a machine.

    chosen: the bytes set in models.yaml. recommended: the GPU's working set; None without a GPU.
    others: what other servers take. A budget that was set is kept as long as the machine has it.
    """
    whole = recommended or int(SHARE_OF_RAM * psutil.virtual_memory().total)
    default = default_budget(whole)
    wanted = chosen or default
    nbytes = max(0, min(wanted, max(wanted, default) - others))
    return MemoryBudget(nbytes, whole, bool(recommended), bool(chosen), others)


def default_budget(recommended: int) -> int:
    # at least half, since the memory for computing may be most of a small container's
    less = recommended - int(WORKING_SHARE * recommended) - WORKING_BYTES
    return max(less, recommended // 2)


def size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} bytes"


@dataclass(frozen=True)
class MemoryParts:
    """The shares of the memory budget: of models on this machine and of models over several."""

    groups: int
    """The number of models over several machines."""
    has_own: bool
    """Whether there are models on this machine alone."""

    def of_group(self, budget: int) -> int:
        """The bytes for one model over several machines. Each of these models gets an equal part,
        and all models on this machine together get another."""
        return budget // max(1, self.groups + self.has_own)  # 0: all are on other servers

    def own(self, budget: int) -> int:
        """The bytes for the models on this machine."""
        return budget - self.groups * self.of_group(budget)


RUSAGE_INFO_V0 = 0


class _RusageInfo(ctypes.Structure):
    """`struct rusage_info_v0` of macOS's <sys/resource.h>."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("user_time", ctypes.c_uint64),
        ("system_time", ctypes.c_uint64),
        ("package_idle_wakeups", ctypes.c_uint64),
        ("interrupt_wakeups", ctypes.c_uint64),
        ("pageins", ctypes.c_uint64),
        ("wired_size", ctypes.c_uint64),
        ("resident_size", ctypes.c_uint64),
        ("physical_footprint", ctypes.c_uint64),
        ("started", ctypes.c_uint64),
        ("exited", ctypes.c_uint64),
    )


def footprint(pid: int) -> int:
    """The bytes of memory that the process takes; 0 if there is no such process.

    On a Mac this is the physical footprint that Activity Monitor shows, since the resident size
    leaves out Metal's buffers and compressed memory.
    """
    if sys.platform == "darwin":
        info = _RusageInfo()
        failed = ctypes.CDLL(None).proc_pid_rusage(pid, RUSAGE_INFO_V0, ctypes.byref(info))
        return 0 if failed else int(info.physical_footprint)
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


PACKAGE = Path(__file__).parents[1]


def processes() -> dict[str, int]:
    """The footprint of this server's processes by their module: `mlx_server.worker.process` is the
    engine. Memory that several of them share is counted in each."""
    server = psutil.Process()
    sizes = Counter({PACKAGE.name: footprint(server.pid)})
    for child in server.children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            for word in child.cmdline():
                module = word.removeprefix(f"{PACKAGE.parent}/").removesuffix(".py")
                if module.startswith((f"{PACKAGE.name}/", f"{PACKAGE.name}.")):
                    sizes[module.replace("/", ".")] += footprint(child.pid)
                    break
    return dict(sizes)
