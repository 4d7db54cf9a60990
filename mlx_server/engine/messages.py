"""What the server and the engine process say to each other: msgpack frames over one socket.

Down: one command a frame. Up: one frame a step, with everything that happened in it.
A row is one sequence being generated; its number is the server's choice and unique.
"""

import struct
from typing import Literal

import msgspec

from mlx_server.engine.device_errors import DeviceErrorKind
from mlx_server.requests import SamplingParams

Stop = Literal["stop", "length"]


class LoadModel(msgspec.Struct, tag=True):
    model: str
    path: str
    stop_tokens: list[int] = []
    """A grammar that has come to its end allows these."""
    tokenizer: str = ""
    """The folder of its tokenizer.json, where that is not the model's own."""


class Schedule(msgspec.Struct, frozen=True):
    """How prompts are computed while other rows decode."""

    prefill_share: float = 0.8
    """Of the time, at most so much is for prompts."""
    longest_gap: float = 0.3
    """Seconds between two tokens of a row, as far as prompts can be cut into pieces."""


DEFAULT_SCHEDULE = Schedule()


class Thinking(msgspec.Struct):
    """How long a row may reason. Marks are text in which each control token is written as the
    byte 255 and its id in brackets, so that no text spells one."""

    budget: int | None
    """Tokens between the marks; None: any number."""
    inside: bool
    """Whether it begins in reasoning."""
    opens: list[bytes]
    closes: list[bytes]
    end: list[int]
    """What is put behind the last token of the budget, and leads on to the answer."""
    answer: int | None = None
    """Tokens that will be taken behind the reasoning: where a grammar has to have ended."""


class Generate(msgspec.Struct, tag=True):
    row: int
    model: str
    prompt: list[int]
    max_tokens: int
    """0: only to be scored."""
    stop_tokens: list[int]
    sampling: SamplingParams
    forced_tokens: list[int] | None = None
    """What a replay model is to say."""
    delay: float = 0.0
    """Seconds that a replay model takes for a token."""
    prompt_logprobs: bool = False
    """Report the log probabilities of the prompt's own tokens first."""
    adapter: str | None = None
    adapter_scale: float = 1.0
    grammar: str | None = None
    """In Lark, for llguidance: of the whole answer, reasoning and calls included."""
    thinking: Thinking | None = None
    overflow_tokens: int = 0
    """The last of max_tokens, for what a grammar can't bring to its end before them. Whoever asked
    cancels the row where it goes on for any other reason."""
    client: str = ""
    """Waiting rows take turns by client."""

    def end_within(self, tokens: int) -> None:
        """Lowers its limit; what is spared goes first."""
        beyond = max(0, self.max_tokens - tokens)
        self.max_tokens -= beyond
        self.overflow_tokens = max(0, self.overflow_tokens - beyond)


class CancelRows(msgspec.Struct, tag=True):
    rows: list[int]


class PauseRows(msgspec.Struct, tag=True):
    """They keep what they have, and get no more until they go on."""

    rows: list[int]


class UnpauseRows(msgspec.Struct, tag=True):
    rows: list[int]


class PreemptRows(msgspec.Struct, tag=True):
    """They give their caches back, and get no more until `Resume`; then they go on as before."""

    rows: list[int]


class ResumeRows(msgspec.Struct, tag=True):
    rows: list[int]


class UnloadModel(msgspec.Struct, tag=True):
    """Rows that are left fail."""

    model: str


class LoadAdapter(msgspec.Struct, tag=True):
    model: str
    adapter: str
    """What rows call it: the digest of its files, so that other weights have another name."""
    path: str


class UnloadAdapter(msgspec.Struct, tag=True):
    """Rows that use it fail."""

    model: str
    adapter: str


class LimitCache(msgspec.Struct, tag=True):
    """What the prompt cache may hold, until the next one of these."""

    max_bytes: int


class LimitMemory(msgspec.Struct, tag=True):
    """What MLX may hold before it waits for work to end, and gives up what it keeps for reuse."""

    max_bytes: int


Command = (
    LoadModel
    | UnloadModel
    | LoadAdapter
    | UnloadAdapter
    | Generate
    | CancelRows
    | PauseRows
    | UnpauseRows
    | PreemptRows
    | ResumeRows
    | LimitCache
    | LimitMemory
)


class Ready(msgspec.Struct, tag=True):
    pid: int
    metal: bool
    recommended_bytes: int | None
    """What Metal says that this machine can hold."""


IMPORTING = "importing MLX"
GENERATING = "generating"
IDLE = "idle"
"""What a beat may say that the process does, among other things."""


class Heartbeat(msgspec.Struct, tag=True):
    """Sent twice a second by a thread of its own, whatever MLX is doing."""

    step_seconds: float
    """How long the present step has taken; 0 when there is nothing to do."""
    longest_seconds: float
    """The longest of late that came to its end; 0 in a step that does something for the first time,
    or for the first time in a while."""
    processor_seconds: float = 0.0
    """That the process used in the present step."""
    doing: str = IDLE


class ModelLoading(msgspec.Struct, tag=True):
    model: str
    done: int
    total: int
    """Bytes."""


class ModelLoaded(msgspec.Struct, tag=True):
    model: str
    vocabulary: int
    """Width of the output head: the largest token id it can produce, plus one."""
    nbytes: int
    why_alone: str = ""
    """Why its rows are computed one at a time; empty where they share a batch."""


class ModelLoadFailed(msgspec.Struct, tag=True):
    model: str
    message: str


class AdapterLoaded(msgspec.Struct, tag=True):
    model: str
    adapter: str
    nbytes: int


class AdapterFailed(msgspec.Struct, tag=True):
    """Nothing of the model has changed."""

    model: str
    adapter: str
    message: str


class AdapterUnloaded(msgspec.Struct, tag=True):
    model: str
    adapter: str


class Admitted(msgspec.Struct, tag=True):
    row: int


class Prefilled(msgspec.Struct, tag=True):
    """The row's turn has come, and so much of its prompt was known from before."""

    row: int
    cached_tokens: int


class PrefillProgress(msgspec.Struct, tag=True):
    """After each piece of a row's prompt."""

    row: int
    computed: int
    """Tokens of the prompt, those included that were known from before."""


class Logprobs(msgspec.Struct, array_like=True):
    chosen: float | None
    top: list[tuple[int, float]]


class Token(msgspec.Struct, array_like=True):
    """One row's share of a step."""

    row: int
    id: int
    finish: Stop | None = None
    """Set with the row's last token; a stop token itself comes with "stop"."""
    logprobs: Logprobs | None = None


class ModelUnloaded(msgspec.Struct, tag=True):
    model: str


class PromptLogprobs(msgspec.Struct, tag=True):
    row: int
    logprobs: list[Logprobs]
    """Of each prompt token but the first, which follows nothing."""


class StepOutput(msgspec.Struct, tag=True):
    model: str
    tokens: list[Token]
    waiting: int
    """Rows that have no token yet."""
    active_bytes: int
    cache_bytes: int
    """Of active_bytes, what the prompt cache holds."""
    buffer_bytes: int = 0
    """What MLX has freed and keeps for reuse."""
    peak_bytes: int = 0
    """The most that active_bytes ever was."""


class RowFailed(msgspec.Struct, tag=True):
    row: int
    message: str


class DeviceFailed(msgspec.Struct, tag=True):
    """The GPU did not do what it was asked. The rows that this cost are reported one by one, unless
    the process ends."""

    kind: DeviceErrorKind
    message: str
    ends: bool
    """Nothing that is left helps but another process, so this one leaves."""


class RowRefused(msgspec.Struct, tag=True):
    """Its grammar can't be used. Comes in place of `Admitted`."""

    row: int
    message: str


Report = (
    Ready
    | Heartbeat
    | ModelLoading
    | ModelLoaded
    | ModelLoadFailed
    | ModelUnloaded
    | AdapterLoaded
    | AdapterFailed
    | AdapterUnloaded
    | Admitted
    | Prefilled
    | PrefillProgress
    | PromptLogprobs
    | StepOutput
    | DeviceFailed
    | RowFailed
    | RowRefused
)

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size

encode_command = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
encode_reports = msgspec.msgpack.Encoder().encode
decode_reports = msgspec.msgpack.Decoder(list[Report]).decode


def frame(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload)) + payload


def length(header: bytes) -> int:
    (size,) = _HEADER.unpack(header)
    return int(size)
