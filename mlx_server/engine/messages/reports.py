"""What the engine process sends to the server: one frame of reports after each step."""

from typing import Literal

import msgspec

from mlx_server.engine.device_errors import DeviceErrorKind
from mlx_server.engine.kv_cost import KvCost

Stop = Literal["stop", "length"]


class Ready(msgspec.Struct, tag=True):
    pid: int
    metal: bool
    recommended_bytes: int | None
    """Metal's recommended working set; None without Metal."""


IMPORTING = "importing MLX"
GENERATING = "generating"
IDLE = "idle"
"""A value of `Heartbeat.doing`. Other values name the work in progress."""


class Heartbeat(msgspec.Struct, tag=True):
    """Sent twice a second by a separate thread, whatever MLX is doing."""

    step_seconds: float
    """The seconds that the present step has taken; 0 when there is nothing to do."""
    longest_seconds: float
    """The longest recent step that ended; 0 in a step that does something for the first time, or
    for the first time in a while."""
    processor_seconds: float = 0.0
    """Processor time that the process used in the present step."""
    doing: str = IDLE


class ModelLoading(msgspec.Struct, tag=True):
    """The progress of a load, in bytes."""

    model: str
    done: int
    total: int


class ModelLoaded(msgspec.Struct, tag=True):
    model: str
    vocabulary: int
    """The width of the output head: the largest token id that it can produce, plus one."""
    nbytes: int
    why_alone: str = ""
    """Why the rows are computed one at a time; empty if they can share a batch."""


class ModelLoadFailed(msgspec.Struct, tag=True):
    model: str
    message: str
    of_files: bool = False
    """Whether it was due to the model's files, rather than to memory, a disk or the device."""


class CacheMeasured(msgspec.Struct, tag=True):
    model: str
    cost: KvCost


class CacheNotMeasured(msgspec.Struct, tag=True):
    """The model can't be built from its config.json."""

    model: str
    message: str


class AdapterLoaded(msgspec.Struct, tag=True):
    model: str
    adapter: str
    nbytes: int


class AdapterFailed(msgspec.Struct, tag=True):
    """The adapter could not be loaded; the model is unchanged."""

    model: str
    adapter: str
    message: str


class AdapterUnloaded(msgspec.Struct, tag=True):
    model: str
    adapter: str


class Admitted(msgspec.Struct, tag=True):
    row: int


class Prefilled(msgspec.Struct, tag=True):
    """The prefill of a row begins, with `cached_tokens` of its prompt from the prompt cache."""

    row: int
    cached_tokens: int


class PrefillProgress(msgspec.Struct, tag=True):
    """Sent after each piece of a row's prompt."""

    row: int
    computed: int
    """Prompt tokens that are computed by now, cached ones included."""


class Logprobs(msgspec.Struct, array_like=True):
    chosen: float | None
    top: list[tuple[int, float]]


class Token(msgspec.Struct, array_like=True):
    """One row's token of a step."""

    row: int
    id: int
    finish: Stop | None = None
    """Set with the row's last token; a stop token itself comes with "stop"."""
    logprobs: Logprobs | None = None
    looped: int = 0
    """The number of tokens that the row repeats, if it or its reasoning is ended for that."""


class ModelUnloaded(msgspec.Struct, tag=True):
    model: str


class PromptLogprobs(msgspec.Struct, tag=True):
    row: int
    logprobs: list[Logprobs]
    """Log probabilities of each prompt token but the first, which follows no other token."""


class Embedded(msgspec.Struct, tag=True):
    row: int
    vectors: list[bytes]
    """The vector of each input, as little-endian 32-bit floats."""


class StepOutput(msgspec.Struct, tag=True):
    model: str
    tokens: list[Token]
    waiting: int
    """The number of rows, of all models, that have no token yet."""
    active_bytes: int
    cache_bytes: int
    """The part of active_bytes that the prompt cache holds."""
    buffer_bytes: int = 0
    """Bytes that MLX has freed and keeps for reuse."""
    peak_bytes: int = 0
    """The largest value that active_bytes has had."""


class ComputedAhead(msgspec.Struct, tag=True):
    """Numbers of tokens of conversations' next prompts, since the last report of this kind."""

    model: str
    computed: int = 0
    """Tokens that were computed before their prompt arrived."""
    used: int = 0
    """Of the tokens computed ahead, the number that a later prompt found in the prompt cache."""


class DiskCacheUse(msgspec.Struct, tag=True):
    """What the prompt cache's tier on disk has done since the last report."""

    hits: int
    misses: int
    """Prompts of which the disk had no more than the memory."""
    tokens: int
    """Prompt tokens that were read from disk."""
    read_bytes: int
    written_bytes: int
    nbytes: int
    """The total size of the files on disk."""


class RowFailed(msgspec.Struct, tag=True):
    row: int
    message: str


class RowLeftGrammar(msgspec.Struct, tag=True):
    """A replay model's row has ended, because the grammar refuses its next recorded token."""

    row: int
    at: int
    """The number of recorded tokens before the refused one."""
    before: list[int]
    """The last of the recorded tokens that precede the refused one."""
    token: int
    allowed: list[int]
    """Some of the tokens that the grammar allows in its place."""
    others: int
    """The number of further tokens that the grammar allows there."""


class DeviceFailed(msgspec.Struct, tag=True):
    """A GPU command failed. A RowFailed follows for each lost row, unless the process ends."""

    kind: DeviceErrorKind
    message: str
    ends: bool
    """Whether the process can't recover and exits."""


class RankLost(msgspec.Struct, tag=True):
    """A rank of the process's group is gone. The process ends, and the group with it."""

    rank: int
    host: str
    """The host's name for ssh, for the log alone."""
    why: str


class RowRefused(msgspec.Struct, tag=True):
    """Sent in place of Admitted when the row's grammar can't be used."""

    row: int
    message: str


class RowTurnedAway(msgspec.Struct, tag=True):
    """Sent in place of Admitted when the row can't be served now; a later attempt may succeed."""

    row: int
    message: str


Report = (
    Ready
    | Heartbeat
    | ModelLoading
    | ModelLoaded
    | ModelLoadFailed
    | ModelUnloaded
    | CacheMeasured
    | CacheNotMeasured
    | AdapterLoaded
    | AdapterFailed
    | AdapterUnloaded
    | Admitted
    | Prefilled
    | PrefillProgress
    | PromptLogprobs
    | Embedded
    | StepOutput
    | ComputedAhead
    | DiskCacheUse
    | DeviceFailed
    | RankLost
    | RowFailed
    | RowLeftGrammar
    | RowRefused
    | RowTurnedAway
)
