"""The messages between the server and the engine process: msgpack frames over one socket.

The server sends one command in a frame; the engine sends one frame of reports after each step.
A row is one sequence being generated; the server chooses its number, which is unique.
"""

import struct
from collections.abc import Sequence
from typing import Literal

import msgspec

from mlx_server.engine.device_errors import DeviceErrorKind
from mlx_server.engine.kv_cost import KvCost
from mlx_server.requests import SamplingParams

Stop = Literal["stop", "length"]

FLUSH_SECONDS = 3.0
"""How long the engine may write prompts to disk before it drops them or ends, if no row runs."""


class LoadModel(msgspec.Struct, tag=True):
    model: str
    path: str
    stop_tokens: list[int] = []
    """The tokens that a grammar allows where it may end."""
    tokenizer: str = ""
    """The folder of tokenizer.json if it is not the model's folder."""
    kv_bits: int | None = None
    """The bits in which keys and values are kept; None: as they are computed."""


class Schedule(msgspec.Struct, frozen=True):
    """How prompts are computed while other rows decode."""

    prefill_share: float = 0.8
    """The largest share of the time that prefill may take."""
    longest_gap: float = 0.3
    """The intended maximum of seconds between two tokens of a row."""


DEFAULT_SCHEDULE = Schedule()


class Thinking(msgspec.Struct):
    """How long a row may reason.

    A delimiter is text in which each control token is written as the byte 255 and its id in
    brackets, so that no ordinary text can spell a control token.
    """

    budget: int | None
    """Most tokens between the delimiters; None for no limit."""
    inside: bool
    """Whether the row starts inside reasoning."""
    opens: list[bytes]
    closes: list[bytes]
    end: list[int]
    """The tokens that are forced after the budget's last token; they lead to the answer."""
    rest: str | None = None
    """The grammar of what follows the forced tokens, in place of the row's; None: the row's."""
    answer: int | None = None
    """Most tokens that the server takes after the reasoning; a grammar has to end within them."""


class Generate(msgspec.Struct, tag=True):
    row: int
    model: str
    prompt: list[int]
    max_tokens: int
    """0 to compute only the prompt's log probabilities."""
    stop_tokens: list[int]
    sampling: SamplingParams
    forced_tokens: list[int] | None = None
    """The recorded output that a replay model plays."""
    recording: str = ""
    """What messages call the recorded output, for example `entry 3 of answers.yaml (line 12)`.
    Empty: the row does not end where its grammar refuses a recorded token."""
    recording_is_cut: bool = False
    """Whether the recorded output was cut off at its end, so that no grammar can complete it."""
    delay: float = 0.0
    """Seconds that a replay model takes for each token."""
    prompt_logprobs: bool = False
    """Whether to report the log probabilities of the prompt's tokens first."""
    adapter: str | None = None
    adapter_scale: float = 1.0
    grammar: str | None = None
    """llguidance's Lark text for the whole answer, reasoning and tool calls included."""
    grammar_prefix: list[int] = []
    """The beginning of the answer, if the prompt has it already: the grammar goes on after it."""
    thinking: Thinking | None = None
    overflow_tokens: int = 0
    """The part of max_tokens, at its end, reserved for finishing a grammar that could not be
    completed before. The server cancels a row that would use it for anything else."""
    client: str = ""
    """The client's name: waiting prompts are served in turns by client."""
    cache_scope: str = ""
    """Rows use the cached prompts of their own scope only."""
    branches: list[int] = []
    """Lengths of the prompt, in order, at which other prompts are expected to differ from it."""
    continued_from: int = 0
    """The length from which the next prompt of the same conversation is expected to differ."""
    on_disk: bool = True
    """Whether what it computes may be written to the prompt cache's files."""

    @property
    def length(self) -> int:
        """The tokens that its caches hold at first."""
        return len(self.prompt)

    def end_within(self, tokens: int) -> None:
        """Lowers the token limit to `tokens`, taking from the overflow tokens first."""
        beyond = max(0, self.max_tokens - tokens)
        self.max_tokens -= beyond
        self.overflow_tokens = max(0, self.overflow_tokens - beyond)


Pooling = Literal["last", "mean"]
"""How the hidden states of a text's tokens become one vector."""


class Embed(msgspec.Struct, tag=True):
    """Asks for the embeddings of texts that are computed together, as one row."""

    row: int
    model: str
    inputs: list[list[int]]
    pooling: Pooling = "last"
    normalize: bool = True
    dimensions: int | None = None
    """How many values each vector has; None: all."""
    logits_of: list[int] = []
    """If there are any, the logits of these tokens are reported in place of the vector."""
    client: str = ""
    """See Generate."""
    adapter: str | None = None

    @property
    def length(self) -> int:
        """The tokens that its caches hold, padding included."""
        return padded_tokens(self.inputs)


def padded_tokens(inputs: Sequence[Sequence[int]]) -> int:
    return len(inputs) * max(map(len, inputs), default=0)


class CancelRows(msgspec.Struct, tag=True):
    rows: list[int]


class PauseRows(msgspec.Struct, tag=True):
    """Pauses rows: they keep their caches and get no tokens until UnpauseRows."""

    rows: list[int]


class UnpauseRows(msgspec.Struct, tag=True):
    rows: list[int]


class PreemptRows(msgspec.Struct, tag=True):
    """Frees the caches of rows, which get no tokens until ResumeRows and then continue."""

    rows: list[int]


class ResumeRows(msgspec.Struct, tag=True):
    rows: list[int]


class ComputeAhead(msgspec.Struct, tag=True):
    """Asks to compute the beginning of a conversation's next prompt into the prompt cache, while
    the engine is idle."""

    model: str
    tokens: list[int]
    most: int
    """The most tokens to compute after those in the prompt cache."""
    adapter: str | None = None
    adapter_scale: float = 1.0
    cache_scope: str = ""
    on_disk: bool = True
    """See Generate."""


class UnloadModel(msgspec.Struct, tag=True):
    """Unloads a model. Its unfinished rows fail."""

    model: str


class MeasureCache(msgspec.Struct, tag=True):
    """Asks what the caches of a model's rows will take; it need not be loaded."""

    model: str
    path: str
    kv_bits: int | None = None
    """See LoadModel."""


class LoadAdapter(msgspec.Struct, tag=True):
    model: str
    adapter: str
    """The name that rows use: the digest of its files, so that other weights have another name."""
    path: str


class UnloadAdapter(msgspec.Struct, tag=True):
    """Unloads an adapter. Rows that use it fail."""

    model: str
    adapter: str


class LimitCache(msgspec.Struct, tag=True):
    """Limits the size of the prompt cache."""

    max_bytes: int


class LimitMemory(msgspec.Struct, tag=True):
    """Sets MLX's memory limit: above it, MLX waits for running work and frees its buffer cache."""

    max_bytes: int


Command = (
    LoadModel
    | UnloadModel
    | MeasureCache
    | LoadAdapter
    | UnloadAdapter
    | Generate
    | Embed
    | CancelRows
    | PauseRows
    | UnpauseRows
    | PreemptRows
    | ResumeRows
    | ComputeAhead
    | LimitCache
    | LimitMemory
)


class Ready(msgspec.Struct, tag=True):
    pid: int
    metal: bool
    recommended_bytes: int | None
    """Metal's recommended working set; None without Metal."""


IMPORTING = "importing MLX"
GENERATING = "generating"
IDLE = "idle"
"""Some of the values of `Heartbeat.doing`."""


class Heartbeat(msgspec.Struct, tag=True):
    """Sent twice a second by a separate thread, whatever MLX is doing."""

    step_seconds: float
    """How long the present step has taken; 0 when there is nothing to do."""
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


SHORTEST_STORED = 16
"""The fewest tokens of a prefix in the prompt cache: a shorter one costs more to keep than to
compute."""


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


class ModelUnloaded(msgspec.Struct, tag=True):
    model: str


class PromptLogprobs(msgspec.Struct, tag=True):
    row: int
    logprobs: list[Logprobs]
    """One for each prompt token but the first, which follows no other token."""


class Embedded(msgspec.Struct, tag=True):
    row: int
    vectors: list[bytes]
    """One for each input, as little-endian 32-bit floats."""


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
    """Computed before their prompt came."""
    used: int = 0
    """Computed before, and found in the prompt cache by a prompt."""


class DiskCacheUse(msgspec.Struct, tag=True):
    """What the prompt cache's tier on disk has done since the last report."""

    hits: int
    misses: int
    """Prompts of which the disk had no more than the memory."""
    tokens: int
    """Prompt tokens that were read."""
    read_bytes: int
    written_bytes: int
    nbytes: int
    """The size of all files now."""


class RowFailed(msgspec.Struct, tag=True):
    row: int
    message: str


class RowLeftGrammar(msgspec.Struct, tag=True):
    """A replay model's row has ended, because the grammar refuses its next recorded token."""

    row: int
    at: int
    """How many recorded tokens came before it."""
    before: list[int]
    """The last of them."""
    token: int
    allowed: list[int]
    """Some of the tokens that the grammar allows there."""
    others: int
    """How many more it allows."""


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
    """Its name for ssh, for the log alone."""
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
