"""The steps of an answer, as `generate` yields them. Every endpoint folds these and nothing else.

Order: one `Started`, then per answer (`index`) its deltas and one `Finished`; answers interleave.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_server.messages import Phase
from mlx_server.requests import SamplingParams

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: str
    bytes: bytes
    logprob: float | None
    """None for the first token of a prompt, which follows nothing."""
    top: tuple["TokenLogprob", ...] = ()
    """The likeliest tokens at this place, best first; empty inside `top` itself."""


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has taken the request: from here on an error ends a running answer."""

    model: str
    prompt_tokens: int
    ignored: tuple[str, ...] = ()
    """Parameters that were set but that this model has no use for."""
    fingerprint: str | None = None
    """Of the adapter's weights."""
    unenforced: tuple[str, ...] = ()
    """What the client's schemas ask for and no grammar holds, as paths in them."""
    sampling: SamplingParams | None = None
    """Of the first answer, whoever chose it: the client, the owner or the publisher."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The prompt in the words of the family's own library, if asked for."""


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """After each piece of a prompt that is computed, if asked for."""

    index: int
    total: int
    cached: int
    computed: int
    """Tokens, those included that were cached."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens that this text came from, if asked for."""
    phase: Phase | None = None
    """None where the model tells no phases apart, or where this goes on with the last one."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    index: int
    call: int
    """Which of the answer's calls, from 0."""
    id: str
    name: str
    """Of one of the tools that were offered."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    index: int
    call: int
    arguments: str
    """A piece of their JSON text; whole once `ToolCallFinished` has come, and not before."""


@dataclass(frozen=True, slots=True)
class ToolCallFinished:
    """A call without one was cut off, or turned out to be none: nobody should make it."""

    index: int
    call: int


@dataclass(frozen=True, slots=True)
class BuiltInCall:
    """Of a tool that the model knows from its training and that nobody offered: nothing runs it,
    and the model goes on without a result."""

    index: int
    tool: str
    """As the model calls it: "browser.search", "python"."""
    text: str
    """Its code, or its arguments as the model wrote them."""
    is_whole: bool = True
    """Or else the answer was cut off in it."""


@dataclass(frozen=True, slots=True)
class ListedTool:
    name: str
    description: str | None = None
    schema: Mapping[str, Any] = field(default_factory=dict)
    """Of its arguments."""
    annotations: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolsListed:
    """What an MCP server offers to this request. They come right behind `Started`."""

    index: int
    server: str
    tools: tuple[ListedTool, ...] = ()
    error: str | None = None
    """Why there are none; beside tools, which others were left out and why."""


@dataclass(frozen=True, slots=True)
class McpCallStarted:
    """As `ToolCallStarted`, of a tool that an MCP server has and that is run here."""

    index: int
    call: int
    """Counted with the calls of function tools, over all rounds."""
    id: str
    server: str
    name: str
    """As the server calls it."""
    approval: str | None = None
    """The id of the approval request that was granted."""


@dataclass(frozen=True, slots=True)
class McpCallDelta:
    index: int
    call: int
    arguments: str


@dataclass(frozen=True, slots=True)
class McpCallReady:
    """Its arguments are whole, and it is going to be run; without one it was cut off."""

    index: int
    call: int


@dataclass(frozen=True, slots=True)
class McpCallFinished:
    """Calls of one turn run together, so these come in any order."""

    index: int
    call: int
    output: str | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ApprovalRequested:
    """A call that is not run before somebody has agreed to it, in another request."""

    index: int
    call: int
    id: str
    server: str
    name: str
    arguments: str


RepairKind = Literal[
    "name",  # of a tool: another spelling of it
    "json",  # a slip in it
    "type",  # of an argument
    "reasoning",  # the answer, or a call, stood in it; or it stood among something else
    "unmarked",  # without the marks that should stand around it
    "stutter",  # a call that was made twice
    "fences",  # or prose around JSON
    "schema",  # JSON that did not conform to it, so that the model was asked again
    "tools",  # none was called although one had to be, so that the model was asked again
    "cut",  # JSON that a limit cut short, continued
]


@dataclass(frozen=True, slots=True)
class Repaired:
    """The model wrote something else than what is told of it. It comes before the event that ends
    what it is about: `ToolCallFinished`, or `Finished`."""

    index: int
    what: RepairKind
    where: str
    """As "tool_calls[0].function.arguments.city", "content" or "reasoning_content"; calls by their
    `call`. Never anything that the model wrote."""


@dataclass(frozen=True, slots=True)
class Violation:
    """The answer is not what was asked for, and stays so. It comes before its `Finished`."""

    index: int
    what: str
    """As "path: what"."""


@dataclass(frozen=True, slots=True)
class Finished:
    index: int
    reason: FinishReason
    completion_tokens: int
    cached_tokens: int
    """Of the prompt, found in the prompt cache."""
    reasoning_tokens: int = 0
    """Of the completion tokens."""
    further_prompt_tokens: int = 0
    """Of the rounds behind the first, whose prompt `Started` tells of."""
    answer_forced: bool = False
    """It stopped after nothing but reasoning, and was led on to an answer."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """All that followed the prompt in the words of the family's own library, if asked for."""


Event = (
    Started
    | PromptProgress
    | TextDelta
    | ReasoningDelta
    | ToolCallStarted
    | ToolCallDelta
    | ToolCallFinished
    | BuiltInCall
    | ToolsListed
    | McpCallStarted
    | McpCallDelta
    | McpCallReady
    | McpCallFinished
    | ApprovalRequested
    | Repaired
    | Violation
    | Finished
)
