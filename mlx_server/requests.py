"""The request that `generate` takes, independent of any endpoint's wire format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, Literal, TypedDict

from annotated_types import Ge, Le

from mlx_server.messages import Conversation

HOPS_HEADER = "x-mlx-server-hops"
"""Tells the next server how many have passed a request on, so that a loop of servers ends."""

DETERMINISTIC_HEADER = "x-mlx-server-deterministic"
"""Asks for a deterministic answer."""


class Tier(IntEnum):
    """The highest is first. Requests are DEFAULT unless they, their key or their client says
    otherwise."""

    PRIORITY = 1
    DEFAULT = 2
    FLEX = 3
    """Work that nobody waits for at the screen, such as that of sub-agents."""
    BATCH = 4

    @property
    def label(self) -> str:
        return self.name.lower()


ServiceTier = Literal[
    "auto", "default", "flex", "priority", "fast", "standard_only", "scale", "performance"
]
"""The values of OpenAI's, Anthropic's and Groq's field. `scale` is the usual tier here."""


@dataclass(frozen=True, slots=True)
class ContextFile:
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Infill:
    """Asks for the text between a prefix and a suffix (fill in the middle)."""

    prefix: str
    suffix: str
    files: tuple[ContextFile, ...] = ()
    """Further files that the model should know, the most important one last."""


Prompt = Conversation | Infill | str | tuple[int, ...]
"""The family renders a conversation, the vocabulary shows the form of an infill prompt, text is
tokenised as it is, token ids are used unchanged."""


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """JSON that follows a schema; without one, any object."""

    schema: Mapping[str, Any] | bool = field(default_factory=lambda: {"type": "object"})
    strict: bool = True
    """If False, keywords that no grammar can enforce are reported and checked afterwards."""
    name: str | None = None
    description: str | None = None


@dataclass(frozen=True, slots=True)
class RegexFormat:
    pattern: str


@dataclass(frozen=True, slots=True)
class ChoiceFormat:
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GrammarFormat:
    """A grammar that the client wrote, in Lark or GBNF."""

    source: str


Format = JsonFormat | RegexFormat | ChoiceFormat | GrammarFormat
"""The format that the text of an answer must have."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that must be called."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


class SamplingChoices(TypedDict, total=False):
    """The sampling parameters that were set explicitly."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of the choice of the next token. They apply in their order (as in vLLM and HF)."""

    logit_bias: dict[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    """Positive logits of tokens in prompt or answer are divided by it, negative ones multiplied
    (CTRL)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both penalties are OpenAI's: they are subtracted from the logits of the answer's tokens."""
    temperature: float = 1.0
    """0 always chooses the likeliest token."""
    top_k: int = 0
    """0 means no limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None draws a new seed for each request."""
    logprobs: int | None = None
    """The number of alternatives to report with the chosen token's log probability, or None for no
    logprobs. They are the model's own, before bias, penalties and temperature."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    model: str
    """A model, or `model:adapter`."""
    prompts: tuple[Prompt, ...]
    adapter: str | None = None
    """The name of an adapter, or its folder within one of the configured adapter folders."""
    adapter_scale: float = 1.0
    n: int = 1
    """Answers per prompt. Answer j of prompt i has index i * n + j in the events."""
    max_tokens: int | None = None
    """None means as many as fit the context. With `echo`, 0 returns the prompt alone."""
    may_end_early: bool = False
    """Whether memory may end an answer before `max_tokens`, which every client has to set."""
    stop: tuple[str, ...] = ()
    choices: SamplingChoices = field(default_factory=SamplingChoices)
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    format: Format | None = None
    format_param: str = "response_format"
    """The client's name of the parameter, for error messages."""
    tool_choice: ToolChoice = "auto"
    thinking_budget: int | None = None
    """Reasoning tokens after which the answer must begin; 0 means no reasoning."""
    max_response_tokens: int | None = None
    """Token limit of the answer, not counting its reasoning."""
    implied: frozenset[str] = frozenset()
    """Template kwargs that the client did not set itself: they are not reported if ignored."""
    param_names: Mapping[str, str] = field(default_factory=dict)
    """The client's names for parameters that have another name here."""
    buffered: bool = False
    """The client sees an answer only once it is complete, so that it can still be repaired."""
    parallel_calls: bool = True
    """Whether an answer may call several tools; if not, it ends with the first call."""
    include_raw: bool | None = None
    """Whether `Finished` has the raw output; None: as the model's owner has set it."""
    echo: bool = False
    """Each answer begins with its prompt, and with the prompt's log probabilities if any."""
    special_tokens: bool = False
    """Whether the answer to a prompt that is no conversation has the text of special tokens."""
    prediction: str = ""
    """Text that the answer is expected to be like, which makes it faster and does not change it."""
    progress: bool = False
    """Whether `PromptProgress` events are sent."""
    client: str = ""
    """Digest of an API key, or an address, which the number of a program may follow. Waiting
    requests take turns by client."""
    service_tier: ServiceTier | None = None
    """The tier that the client asks for; `auto` and None leave it to its key and what it sends."""
    tier: Tier = Tier.DEFAULT
    """The tier in which the request is served."""
    hops: int = 0
    """The number of servers of this kind that have passed the request on."""
    cache_scope: str = ""
    """Requests use the cached prompts of their own scope only."""
    on_disk: bool = True
    """Whether the prompt cache may write what is computed to disk."""
    deterministic: bool = False
    """Whether the same request gets the same answer bit for bit, whatever else the server
    computes."""

    @property
    def reported_tier(self) -> str | None:
        """The tier that the answer names; None for the default tier if the request named none."""
        is_reported = self.service_tier is not None or self.tier is not Tier.DEFAULT
        return self.tier.label if is_reported else None


@dataclass(frozen=True, slots=True)
class ToolFilter:
    """Selects some of a server's tools: a tool must meet every condition that is set."""

    names: frozenset[str] | None = None
    read_only: bool | None = None
    """Whether the tool must (or must not) have the server's `readOnlyHint`."""

    def holds(self, name: str, *, read_only: bool) -> bool:
        named = self.names is None or name in self.names
        return named and self.read_only in (None, read_only)


ALL_TOOLS, NO_TOOLS = ToolFilter(), ToolFilter(names=frozenset())


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server that a request names, by URL or as a connector of models.yaml."""

    label: str
    url: str | None = None
    connector: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    authorization: str | None = None
    """A bearer token."""
    allowed: ToolFilter = ALL_TOOLS
    always_approve: ToolFilter = NO_TOOLS
    """Tools that run only after approval. It takes precedence over `never_approve`."""
    never_approve: ToolFilter = NO_TOOLS
    """Tools that run at once. A tool that neither filter selects needs approval."""
    listed: bool = False
    """The client has the tool list from an earlier response: it is sent again only on errors."""
    param: str = "tools"
    """The client's name of the parameter, for error messages."""


@dataclass(frozen=True, slots=True)
class Approval:
    """The reply to an `ApprovalRequested`, whose fields it repeats."""

    id: str
    server: str
    name: str
    arguments: str
    approve: bool
    reason: str | None = None
    extra_content: Mapping[str, Any] | None = field(default=None, hash=False)
    """See `ToolCall.extra_content`."""


@dataclass(frozen=True, slots=True)
class McpChoice:
    """A server's tool that must be called; `name` None means any of the server's tools."""

    server: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class McpTools:
    """The part of a request that concerns MCP servers."""

    servers: tuple[McpServer, ...] = ()
    approvals: tuple[Approval, ...] = ()
    """Approvals that were not acted upon yet. Their calls follow the end of the conversation."""
    choice: McpChoice | None = None
    """Takes precedence over the request's `tool_choice`."""
    max_calls: int | None = None


@dataclass(frozen=True, slots=True)
class RepairPolicy:
    mistakes: bool = True
    """Whether mistakes are corrected where only one thing can be meant: in JSON and around it, in
    the names of tools and the types of their arguments, calls in the wrong place, and an answer
    that is all in the reasoning, which is continued once."""
    retries: Annotated[int, Ge(0), Le(4)] = 1
    """The number of times that an answer which breaks the required format is generated again. An
    answer that has been streamed in part is never generated again."""
    loops: int | None = 6
    """How often the same tokens come in a row until the answer is ended. Less than 256 tokens count
    as that many. None never ends it."""


ALL_REPAIRS = RepairPolicy()
