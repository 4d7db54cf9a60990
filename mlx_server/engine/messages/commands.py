"""What the server sends to the engine process: one command in a frame."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from mlx_server.requests import SamplingParams


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
    prompt_top_logprobs: int = 0
    """The number of alternatives to report with them, if more than with the answer's tokens."""
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
    shared: int = 0
    """The length of the prompt's beginning that other conversations have too: tools and system
    prompt."""
    on_disk: bool = True
    """Whether the row's cache may be written to the prompt cache's files."""
    loops: int | None = None
    """How often the same tokens may come in a row until it ends; None for no limit."""

    @property
    def length(self) -> int:
        """The number of tokens that have to be computed for the row before it generates any."""
        return len(self.prompt)

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
    adapter: str | None = None

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
