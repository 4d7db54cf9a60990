"""The messages between the server and the engine process: msgpack frames over one socket.

The server sends commands, and the engine one frame of reports after each step. A row is one
sequence being generated; the server chooses its number, which is unique.
"""

import hashlib
import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Literal

import msgspec

from mlx_server.engine.device_errors import DeviceErrorKind
from mlx_server.requests import SamplingParams, Tier

ComputeDtype = Literal["auto", "bfloat16", "float16"]
"""The precision of a model whose files have 16 bits; auto: that of the files, or float16 where the
chip emulates bfloat16 and the model's values allow it."""


class LoadModel(msgspec.Struct, tag=True):
    model: str
    path: str
    stop_tokens: list[int] = []
    """The tokens that a grammar allows where it may end."""
    tokenizer: str = ""
    """The folder of tokenizer.json if it is not the model's folder."""
    kv_bits: int | None = None
    """Bits of each cached key and value; None keeps them in the type in which they are computed."""
    most_padding: int | None = None
    """The tokens by which groups of decoding rows may be padded together; None: any number."""
    compute_dtype: ComputeDtype = "auto"
    sees: bool = False
    """Whether its vision tower is loaded too."""
    speculation: bool = True
    """Whether passes may compute drafted tokens too."""


STEP = 256
"""Number of tokens by which mlx-lm's KV caches grow."""

PADDING_SHARE = 8
"""Padding of groups of decoding rows may take one part in so many of the memory that the weights
leave."""

PREFILL_PADDING = 2400
"""The tokens by which prompts that are computed together may be padded."""


@dataclass(frozen=True)
class KvCost:
    """Bytes that one row occupies in a model's caches."""

    per_token: int = 0
    windowed_per_token: int = 0
    window: int = 0
    fixed: int = 0

    def for_tokens(self, n: int) -> int:
        # A cache grows in steps, which need not begin at multiples of STEP.
        slots = n + STEP - 1
        windowed = self.windowed_per_token * min(slots, self.window)
        return self.per_token * slots + windowed + self.fixed

    def tokens_in(self, nbytes: int, at_most: int) -> int:
        """Returns the number of tokens that fit into `nbytes`, up to `at_most`."""
        return max(0, bisect_right(range(at_most + 1), nbytes, key=self.for_tokens) - 1)

    def most_padding(self, room: int) -> int | None:
        """Returns the tokens by which groups of decoding rows may be padded; None: any number.

        room: the bytes of the budget that the model's weights leave.
        """
        each = self.per_token + self.windowed_per_token
        return max(0, room) // PADDING_SHARE // each if each else None

    def padding_bytes(self, most_padding: int) -> int:
        """Returns the most bytes of padding, in groups of decoding rows and in prompts computed
        together."""
        return (self.per_token + self.windowed_per_token) * (most_padding + PREFILL_PADDING)


NO_CACHES = KvCost()


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What an answer has to be. The engine writes it as llguidance's Lark, and reads the schemas to
    complete their JSON before the token limit."""

    rules: str
    """Rules in llguidance's Lark, of which the first is `start`."""
    schemas: tuple[tuple[str, str], ...] = ()
    """The rules that are JSON schemas: their names, and the schemas as JSON."""
    frames: tuple[tuple[str, str], ...] = ()
    """The objects around some of these, which the rules spell out: the name of the schema, and that
    of the object, in which the schema is `{"$ref": "#"}`."""

    is_schema: bool = False
    """Whether the whole answer is the JSON of one schema."""

    @property
    def source(self) -> str:
        """The grammar in Lark."""
        schemas = (f"{name}: %json {schema}\n" for name, schema in self.schemas)
        return self.rules + "".join(schemas)


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
    rest: Grammar | None = None
    """The grammar of what follows the forced tokens, in place of the row's; None: the row's."""
    answer: int | None = None
    """Most tokens that the server takes after the reasoning; a grammar has to end within them."""


FIRST_MEDIA_ID = 1 << 30
"""Ids from here on are those of image tokens: no vocabulary has as many tokens."""


DIGEST_BYTES = 32


def media_ids(digest: bytes, count: int) -> list[int]:
    """The ids of a picture's tokens, which no other picture has: the prompt cache tells pictures
    apart as it tells words apart. Each has 30 bits of a stream that the digest decides."""
    stream = array("I", hashlib.shake_256(digest).digest(4 * count))
    return [FIRST_MEDIA_ID | (value & (FIRST_MEDIA_ID - 1)) for value in stream]


class Picture(msgspec.Struct, frozen=True, array_like=True):
    """A picture in a prompt, in its sizes for the model."""

    at: int
    """The place of its first token in the prompt."""
    digest: bytes
    tokens: int
    sizes: list[tuple[int, int]]
    """The width and the height of each view of it; none if a borrowed processor made its inputs."""
    pixels: bytes
    """Three bytes each, row by row, view by view; or inputs as a safetensors file, whose metadata
    say where the picture's tokens begin and end among their `input_ids`."""
    texts: list[tuple[int, int]] = []
    """Places within the picture's tokens that have a token of text, and that token."""

    @property
    def own_digest(self) -> bytes:
        """The picture's: what follows in `digest` tells prompts apart whose tokens all see each
        other, so that the prompt cache has nothing of one for another one."""
        return self.digest[:DIGEST_BYTES]


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
    grammar: Grammar | None = None
    """That of the whole answer, reasoning and tool calls included."""
    grammar_prefix: list[int] = []
    """The beginning of the answer, if the prompt has it already: the grammar goes on after it."""
    thinking: Thinking | None = None
    overflow_tokens: int = 0
    """The part of max_tokens, at its end, reserved for finishing a grammar that could not be
    completed before. The server cancels a row that would use it for anything else."""
    client: str = ""
    """The client's name: waiting prompts are served in turns by client."""
    tier: Tier = Tier.DEFAULT
    cache_scope: str = ""
    """Rows use the cached prompts of their own scope only."""
    branches: list[int] = []
    """Lengths of the prompt, in order, at which other prompts are expected to differ from it."""
    continued_from: int = 0
    """The length from which the next prompt of the same conversation is expected to differ."""
    shared: int = 0
    """The length of the prompt's beginning that other conversations have too: tools and system
    prompt."""
    on_disk: bool = True
    """Whether the row's cache may be written to the prompt cache's files."""
    loops: int | None = None
    """How often the same tokens may come in a row until it ends; None for no limit."""
    deterministic: bool = False
    """Whether its tokens are the same bit for bit, whatever else the engine does or has cached."""
    pictures: list[Picture] = []
    """The pictures of the prompt, in order; the prompt has their `media_ids`."""
    prediction: list[int] = []
    """What the client expects the answer to be like: drafts are taken from it."""
    own_seed: int | None = None
    """The seed of its noise if the request has none; None: any."""
    generated: list[int] = []
    """The answer's tokens so far, if another engine generated them: the row goes on after them as
    if it had."""

    @property
    def tokens(self) -> list[int]:
        """The tokens that precede the next one."""
        return [*self.prompt, *self.generated] if self.generated else self.prompt

    @property
    def length(self) -> int:
        """The number of tokens that have to be computed for the row before it generates any."""
        return len(self.prompt) + len(self.generated)

    def end_within(self, tokens: int) -> None:
        """Lowers the token limit to `tokens`, taking from the overflow tokens first."""
        beyond = max(0, self.max_tokens - tokens)
        self.max_tokens -= beyond
        self.overflow_tokens = max(0, self.overflow_tokens - beyond)


Pooling = Literal["last", "mean", "cls"]
"""The way in which the hidden states of a text's tokens become one vector: `cls` takes the
first."""


class Embed(msgspec.Struct, tag=True):
    """Asks for the embeddings of texts that are computed together, as one row."""

    row: int
    model: str
    inputs: list[list[int]]
    pooling: Pooling = "last"
    normalize: bool = True
    dimensions: int | None = None
    """The number of values of each vector; None takes all."""
    logits_of: list[int] = []
    """If there are any, the logits of these tokens are reported in place of the vector."""
    scores: bool = False
    """Whether the scores of the model's own head are reported in place of the vector."""
    second_from: list[int] = []
    """The position where the second text of each pair begins; empty if the inputs are no pairs."""
    client: str = ""
    """See Generate."""
    tier: Tier = Tier.DEFAULT
    adapter: str | None = None
    deterministic: bool = False
    """Whether its pieces have the same sizes whatever else the engine does."""

    @property
    def length(self) -> int:
        """The number of tokens that have to be computed, padding included."""
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
    compute_dtype: ComputeDtype = "auto"
    """See LoadModel, as for `kv_bits`."""


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


Replied = LoadModel | UnloadModel | MeasureCache | LoadAdapter | UnloadAdapter
"""The commands with a reply."""

Command = (
    Replied
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


Stop = Literal["stop", "length"]


class Ready(msgspec.Struct, tag=True):
    pid: int
    gpu: bool
    recommended_bytes: int | None
    """The GPU's memory that programs may use; None without a GPU."""


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
    """Processor time that the busiest thread has used in the present step, once it is long."""
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


class CacheMeasured(msgspec.Struct, tag=True):
    model: str
    cost: KvCost


class AdapterLoaded(msgspec.Struct, tag=True):
    model: str
    adapter: str
    nbytes: int


class Unloaded(msgspec.Struct, tag=True):
    """A model, or one of its adapters, is no more in memory."""

    model: str
    adapter: str = ""


class CommandFailed(msgspec.Struct, tag=True):
    """What was to be loaded or measured could not be; all else is unchanged."""

    command: Literal["LoadModel", "MeasureCache", "LoadAdapter"]
    model: str
    message: str
    adapter: str = ""
    of_files: bool = False
    """Whether it was due to the model's files, rather than to memory, a disk or the device."""


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
    drafts: tuple[int, int] | None = None
    """With the last token of a pass that computed drafts of the row: how many drafted tokens it
    computed, and how many of them came."""


class PromptLogprobs(msgspec.Struct, tag=True):
    """Sent after each piece of the prompt, since to read a million at once takes a second."""

    row: int
    logprobs: list[Logprobs]
    """Log probabilities of the piece's tokens. The first token follows no other and has none."""


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

    hits: int = 0
    misses: int = 0
    """Prompts of which the disk had no more than the memory."""
    tokens: int = 0
    """Prompt tokens that were not in memory and came from disk."""
    read_bytes: int = 0
    written_bytes: int = 0
    nbytes: int = 0
    """The total size of the files on disk."""


class RowFailed(msgspec.Struct, tag=True):
    row: int
    message: str
    error: str = ""
    """The name of the error's class, for which the message is whole; empty if the row could not be
    continued."""


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


Report = (
    Ready
    | Heartbeat
    | ModelLoading
    | ModelLoaded
    | CacheMeasured
    | AdapterLoaded
    | Unloaded
    | CommandFailed
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
)


FLUSH_SECONDS = 3.0
"""How long the engine may write prompts to disk before it drops them or ends, if no row runs."""

SHORTEST_STORED = 16
"""The fewest tokens of a prefix in the prompt cache: a shorter one costs more to keep than to
compute."""

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size

encode_command = encode_commands = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
encode_reports = msgspec.msgpack.Encoder().encode
decode_reports = msgspec.msgpack.Decoder(list[Report]).decode


def frame(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload)) + payload


def length(header: bytes) -> int:
    (size,) = _HEADER.unpack(header)
    return int(size)


def payloads(stream: IO[bytes], most: int = sys.maxsize) -> Iterator[bytes]:
    """Yields those of frames until the stream ends, be it in the middle of one. Raises DecodeError
    for one that is longer than `most`."""
    while len(header := stream.read(HEADER_BYTES)) == HEADER_BYTES:
        if (size := length(header)) > most:
            raise msgspec.DecodeError("it is too long")
        if len(payload := stream.read(size)) < size:
            return
        yield payload
