"""The arguments of an engine process, as one JSON argument of its command line."""

import msgspec

from mlx_server.engine.rank_group import RankGroup


class WorkerArguments(msgspec.Struct, frozen=True):
    concurrency: int = 16
    cache_bytes: int = 0
    wired: str = "never"
    """auto, never or bytes: see `wiring`."""
    disk_bytes: int = 0
    """The most bytes of the prompt cache's files; 0: none are written."""
    disk_folder: str = ""
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
