"""The arguments of an engine process, as one JSON argument of its command line.

Several processes, on one machine each, may hold one model together. The engine process is rank 0.
It starts the others, over ssh where they are on another machine.
"""

import json
from pathlib import Path
from typing import Literal

import msgspec

from mlx_server import limits
from mlx_server.system.daily_bytes import DailyBytes

Mode = Literal["tensor", "pipeline"]
"""tensor: each rank has a part of every layer. pipeline: each rank has some of the layers."""

Backend = Literal["ring", "jaccl", "jaccl-ring"]

FIRST_PORT = 32323
"""The first port that ranks listen on, as in `mlx.launch`."""


class RankHost(msgspec.Struct, frozen=True):
    ssh: str
    ips: tuple[str, ...]
    """The addresses of this host on which its rank listens."""
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()
    """The RDMA devices that connect this host to each rank, in the order of the ranks. Only JACCL
    uses them."""
    is_local: bool = False
    """Whether this is the server's own machine, which is reached without ssh."""


class RankGroup(msgspec.Struct, frozen=True):
    mode: Mode
    hosts: tuple[RankHost, ...]
    port: int = FIRST_PORT
    """The first of the ports to listen on: each address of each rank gets the next one."""
    backend: Backend = "ring"
    python: str = ""
    """The interpreter of the other machines; empty: the same path as here."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables that all ranks get."""

    @property
    def ports(self) -> int:
        """The number of ports that a rank listens on."""
        return sum(len(host.ips) for host in self.hosts)

    def backend_files(self) -> dict[str, str]:
        """Returns the text of each file that the backend reads, by the environment variable for its
        path."""
        if self.backend == "ring":
            return {"MLX_HOSTFILE": json.dumps(self.addresses())}
        return {"MLX_IBV_DEVICES": json.dumps([host.rdma for host in self.hosts])}

    def backend_variables(self) -> dict[str, str]:
        if self.backend == "ring":
            return {}
        coordinator = {"MLX_JACCL_COORDINATOR": f"{self.hosts[0].ips[0]}:{self.port}"}
        return coordinator | ({"MLX_JACCL_RING": "1"} if self.backend == "jaccl-ring" else {})

    def addresses(self) -> list[list[str]]:
        """Returns the addresses on which each rank listens, as `address:port`."""
        port, addresses = self.port, []
        for host in self.hosts:
            addresses.append([f"{ip}:{port + i}" for i, ip in enumerate(host.ips)])
            port += len(host.ips)
        return addresses


class PromptDisk(msgspec.Struct, frozen=True):
    """The folder in which the engine keeps prompt caches on disk, and its size."""

    folder: str
    most_bytes: int
    """The limit on all files; 0 keeps nothing on disk."""
    writes_per_day: int = limits.PROMPT_WRITES_PER_DAY
    """The limit on what all servers of the folder write."""

    @property
    def daily(self) -> DailyBytes:
        return DailyBytes(Path(self.folder), self.writes_per_day)


NO_DISK = PromptDisk("", 0)


class WorkerArguments(msgspec.Struct, frozen=True):
    concurrency: int = 16
    cache_bytes: int = 0
    disk: PromptDisk = NO_DISK
    curves: str = ""
    """The folder of measured cost curves; empty: none are measured."""
    tier_wait: float = float(limits.TIER_WAIT_SECONDS)
    """How long lower tiers wait at most, in seconds."""
    group: RankGroup | None = None
    """Set if the process is rank 0 of a group, which it starts."""


class RankArguments(msgspec.Struct, frozen=True):
    """The arguments of the other ranks."""

    rank: int
    group: RankGroup
    worker: WorkerArguments


encode_arguments = msgspec.json.Encoder().encode
decode_worker_arguments = msgspec.json.Decoder(WorkerArguments).decode
decode_rank_arguments = msgspec.json.Decoder(RankArguments).decode
