"""What an endpoint asks of `generate`, in no endpoint's own terms."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from mlx_server.messages import Conversation

Prompt = Conversation | str | tuple[int, ...]
"""A conversation is rendered by the family, text tokenised as it is, token ids taken."""


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """JSON that follows a schema; without one, any object."""

    schema: Mapping[str, Any] | bool = field(default_factory=lambda: {"type": "object"})
    strict: bool = True
    """If not, what no grammar can say is left out, told of, and checked afterwards."""
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
"""What the text of an answer has to be."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """One tool, which has to be called."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


class SamplingChoices(TypedDict, total=False):
    """The sampling parameters that somebody set; the rest come from further down (see resolve)."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, applied in the order of the fields (as vLLM and HF do)."""

    logit_bias: dict[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt or answer, multiplies negative ones (CTRL)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both as OpenAI defines them: subtracted for tokens of the answer."""
    temperature: float = 1.0
    """0: the likeliest token, always."""
    top_k: int = 0
    """0: no limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None: a fresh one each time."""
    logprobs: int | None = None
    """How many alternatives to report beside the chosen token's log probability; None: nothing.
    They are the model's own, before bias, penalties and temperature."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    model: str
    """May name an adapter as well: `model:adapter`."""
    prompts: tuple[Prompt, ...]
    adapter: str | None = None
    """A name, or a folder in a place where adapters may lie."""
    adapter_scale: float = 1.0
    n: int = 1
    """Answers per prompt; answer j of prompt i has index i * n + j in the events."""
    max_tokens: int | None = None
    """None: as many as the context has room for; 0, with echo: only the prompt."""
    stop: tuple[str, ...] = ()
    choices: SamplingChoices = field(default_factory=SamplingChoices)
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    format: Format | None = None
    format_param: str = "response_format"
    """What the client called it, for errors."""
    tool_choice: ToolChoice = "auto"
    thinking_budget: int | None = None
    """Tokens of reasoning after which the answer itself begins; 0: no reasoning."""
    max_response_tokens: int | None = None
    """Of the answer, its reasoning aside."""
    implied: frozenset[str] = frozenset()
    """Of the templates' kwargs: what the client did not say, and need not hear of if ignored."""
    buffered: bool = False
    """Nobody sees an answer before it has come to its end, so that it can still be mended."""
    parallel_calls: bool = True
    """Whether an answer may call several tools; if not, it ends with the first call."""
    raw_messages: bool = False
    """Whether the events carry the messages in the words of the family's own library."""
    echo: bool = False
    """Each answer begins with its prompt, and with the prompt's log probabilities if any."""
    progress: bool = False
    """Whether the events say how much of each prompt is computed."""
    client: str = ""
    """Who asks: the digest of an API key, or an address. Waiting requests take turns by client."""


@dataclass(frozen=True, slots=True)
class ToolFilter:
    """Some of a server's tools; everything that is set has to hold."""

    names: frozenset[str] | None = None
    read_only: bool | None = None
    """Whether the server says that a tool changes nothing."""

    def holds(self, name: str, *, read_only: bool) -> bool:
        named = self.names is None or name in self.names
        return named and self.read_only in (None, read_only)


ALL_TOOLS, NO_TOOLS = ToolFilter(), ToolFilter(names=frozenset())


@dataclass(frozen=True, slots=True)
class McpServer:
    """One that a request names: by URL, or a connector of models.yaml."""

    label: str
    url: str | None = None
    connector: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    authorization: str | None = None
    """A bearer token."""
    allowed: ToolFilter = ALL_TOOLS
    always_approve: ToolFilter = NO_TOOLS
    """Tools that are never run before somebody has agreed; it wins over"""
    never_approve: ToolFilter = NO_TOOLS
    """... those that are run at once. Tools in neither need approval, too."""
    listed: bool = False
    """The client has its list from an earlier response: it is not told again, if all went well."""
    param: str = "tools"
    """What the client called it, for errors."""


@dataclass(frozen=True, slots=True)
class Approval:
    """Somebody's answer to an `ApprovalRequested`, whose other fields it repeats."""

    id: str
    server: str
    name: str
    arguments: str
    approve: bool
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class McpChoice:
    """One tool of a server, or any of them, which has to be called."""

    server: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class McpTools:
    """What a request asks of MCP servers."""

    servers: tuple[McpServer, ...] = ()
    approvals: tuple[Approval, ...] = ()
    """Those not acted upon yet; they concern calls behind the end of the conversation."""
    choice: McpChoice | None = None
    """Wins over the request's `tool_choice`."""
    max_calls: int | None = None
