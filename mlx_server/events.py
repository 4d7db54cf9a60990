"""The events that `generate` yields, and the `Answer` that they add up to.

`Started` comes once, then each answer (`index`) has its deltas and one `Finished`. The events of
several answers interleave.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from mlx_server.messages import Message, Phase, ToolCall
from mlx_server.requests import SamplingParams

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: str
    bytes: bytes
    logprob: float | None
    """None for the first token of a prompt, which has no context to be predicted from."""
    top: tuple["TokenLogprob", ...] = ()
    """The likeliest tokens at this position, best first. Entries of `top` have no `top`."""
    id: int | None = field(default=None, compare=False)
    """None where another server answers."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens of answers, besides the prompt that `Started` reports."""

    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that came from the prompt cache."""
    reasoning_tokens: int = 0
    """The completion tokens that are reasoning."""
    text_tokens: int = 0
    """The tokens of the answer's text: neither reasoning nor calls nor delimiters."""
    further_prompt_tokens: int = 0
    """Prompt tokens of the rounds after the first, whose prompt `Started` reports."""
    further_tool_output_tokens: int = 0
    """Tokens of the tool results that these rounds added."""
    accepted_draft_tokens: int = 0
    """The completion tokens that were drafted, so that no pass of their own computed them."""
    rejected_draft_tokens: int = 0
    """Drafted tokens that were computed and did not come."""

    @property
    def tokens_per_pass(self) -> float | None:
        """None for an answer without tokens."""
        return tokens_per_pass(self.completion_tokens, self.accepted_draft_tokens)


def tokens_per_pass(tokens: int, accepted: int) -> float | None:
    """accepted: the tokens that had no pass of their own."""
    return tokens / max(1, tokens - accepted) if tokens else None


def total(counts: Iterable[TokenCounts]) -> TokenCounts:
    found = list(counts)
    names = [field.name for field in fields(TokenCounts)]
    return TokenCounts(**{name: sum(getattr(each, name) for each in found) for name in names})


@dataclass(frozen=True, slots=True)
class RowProgress:
    """How far the engine has come with the rows of a request."""

    computed_tokens: int = 0
    """Prompt tokens that are computed, of rows in prefill."""
    decoding_since: float | None = None
    """The `time.perf_counter()` of the first token."""


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has accepted the request. Any later error ends an answer that is running."""

    model: str
    prompt_tokens: int
    ignored: tuple[str, ...] = ()
    """Parameters that the request set and that this model cannot use."""
    fingerprint: str | None = None
    """OpenAI's `system_fingerprint`; None where another server answers."""
    unenforced: tuple[str, ...] = ()
    """Paths of the schema keywords that no grammar enforces."""
    service_tier: str | None = None
    """The tier in which it is served; None for the usual one of a client that asked for none."""
    sampling: SamplingParams | None = None
    """Parameters of the first answer, resolved from client, models.yaml and checkpoint."""
    tool_output_tokens: int = 0
    """Tokens of the tool results at the end of the prompt, which no earlier prompt had."""
    normalized: tuple[str, ...] = ()
    """Names of the lines that were taken out of the prompt."""
    estimated_prompt_tokens: int = 0
    """An estimate of the tokens that an upstream counts only at the end of its answer."""
    unfinished: Callable[[], TokenCounts] = field(default=TokenCounts, compare=False, repr=False)
    """The tokens so far of the answers without a `Finished`. An answer that is abandoned or fails
    never has one."""
    rows: Callable[[], RowProgress] = field(default=RowProgress, compare=False, repr=False)
    """How far the engine has come at this moment."""


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Reported after each chunk of prefill, if requested."""

    index: int
    total: int
    cached: int
    computed: int
    """Prompt tokens that are done, cached ones included."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log probabilities of this text's tokens, if requested."""
    phase: Phase | None = None
    """None if the model has no phases, or if the phase has not changed since the last delta."""
    separator: str = ""
    """White space between this text and the text before the last call, thought or message. It
    belongs to neither, and precedes this text where both are reported as one string."""

    @property
    def separated(self) -> str:
        return self.separator + self.text


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    index: int
    text: str
    separator: str = ""
    """White space between this thought and the one before; see `TextDelta.separator`."""
    begins_message: bool = False
    """Whether the thought before is a message of its own, and this text begins the next one."""

    @property
    def separated(self) -> str:
        return self.separator + self.text


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    index: int
    call: int
    """Number of the call within the answer, from 0."""
    id: str
    name: str
    """Name of one of the tools in the request."""
    extra_content: Mapping[str, Any] | None = field(default=None, hash=False)
    """See `ToolCall.extra_content`."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    index: int
    call: int
    arguments: str
    """The next part of the arguments' JSON text, which is complete after `ToolCallFinished`."""


@dataclass(frozen=True, slots=True)
class ToolCallFinished:
    """The call is complete. A call without this event was cut off or invalid: do not run it."""

    index: int
    call: int


@dataclass(frozen=True, slots=True)
class BuiltInCall:
    """A call of a tool that the model knows from training and that the request does not have.

    It is not run, and the model continues without a result.
    """

    index: int
    tool: str
    """The model's name for it: "browser.search", "python"."""
    text: str
    """The code to run, or the arguments as the model wrote them."""
    is_whole: bool = True
    """False if the answer was cut off within the call."""


@dataclass(frozen=True, slots=True)
class ListedTool:
    name: str
    description: str | None = None
    schema: Mapping[str, Any] = field(default_factory=dict)
    """JSON Schema of the arguments."""
    annotations: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolsListed:
    """The tools of one MCP server that this request may use. It follows `Started`."""

    index: int
    server: str
    tools: tuple[ListedTool, ...] = ()
    error: str | None = None
    """Why there are no tools or, if there are some, which others were left out and why."""


@dataclass(frozen=True, slots=True)
class McpCallStarted:
    """Like `ToolCallStarted`, for an MCP server's tool, which this server calls itself."""

    index: int
    call: int
    """Number of the call, counted together with function calls over all rounds."""
    id: str
    server: str
    name: str
    """The tool's name on that server."""
    approval: str | None = None
    """The id of the approval request that was granted."""
    extra_content: Mapping[str, Any] | None = field(default=None, hash=False)
    """See `ToolCall.extra_content`."""


@dataclass(frozen=True, slots=True)
class McpCallDelta:
    index: int
    call: int
    arguments: str


@dataclass(frozen=True, slots=True)
class McpCallReady:
    """The arguments are complete and the call will be run. Without this event it was cut off."""

    index: int
    call: int


@dataclass(frozen=True, slots=True)
class McpCallFinished:
    """The call has its result. Calls of one turn run concurrently and finish in any order."""

    index: int
    call: int
    output: str | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ApprovalRequested:
    """A call that is run only after another request has approved it."""

    index: int
    call: int
    id: str
    server: str
    name: str
    arguments: str
    extra_content: Mapping[str, Any] | None = field(default=None, hash=False)
    """See `ToolCall.extra_content`."""


RepairKind = Literal[
    "name",  # a tool name in another spelling
    "json",  # a syntax error in JSON
    "type",  # an argument of the wrong type, or an upstream's number that was none
    "reasoning",  # an answer or a call inside reasoning, or reasoning in the wrong place
    "unmarked",  # a call or reasoning without its delimiters
    "format",  # a call that breaks its format: a delimiter missing, doubled or of another format
    "stutter",  # a call that was repeated more often than models.yaml allows
    "fences",  # code fences or free text around JSON
    "schema",  # JSON that did not match its schema: the answer was generated again
    "tools",  # a required tool call was missing: the answer was generated again
    "cut",  # JSON that was cut off by the token limit and then continued
    "empty",  # an answer without text or calls: an upstream was asked again
    "usage",  # token counts that an upstream did not report: they were estimated
]


@dataclass(frozen=True, slots=True)
class Repaired:
    """The model's output was corrected before it was reported. This event comes before the one
    that ends the corrected part: `ToolCallFinished` or `Finished`."""

    index: int
    what: RepairKind
    where: str
    """A path such as "tool_calls[0].function.arguments.city", "content" or "reasoning_content",
    with the number of the call. It never contains text that the model wrote."""


CALL_PLACE = re.compile(r"(?<=^tool_calls\[)\d+(?=\])")


def renumbered(path: str, number: Callable[[int], int]) -> str:
    """A path such as `tool_calls[0].arguments` with another number of the call."""
    return CALL_PLACE.sub(lambda found: str(number(int(found[0]))), path)


@dataclass(frozen=True, slots=True)
class Violation:
    """The answer breaks the requested format and was not repaired. It precedes `Finished`."""

    index: int
    what: str
    """The text "path: reason"."""


@dataclass(frozen=True, slots=True)
class Finished:
    index: int
    reason: FinishReason
    counts: TokenCounts = TokenCounts()
    stop_string: str | None = None
    """The client's stop string that ended the answer."""
    answer_forced: bool = False
    """Whether the model stopped after its reasoning and was continued with an answer prefix."""
    raw: tuple[str, ...] = ()
    """The model's raw output, delimiters included, if requested: one text for each attempt and
    round."""


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


@dataclass(slots=True)
class CallSoFar:
    id: str
    name: str
    extra_content: Mapping[str, Any] | None = None
    arguments: list[str] = field(default_factory=list)
    """The parts of the arguments' JSON text."""
    is_finished: bool = False

    def as_tool_call(self) -> ToolCall:
        arguments = "".join(self.arguments)
        return ToolCall(self.id, self.name, arguments, extra_content=self.extra_content)


@dataclass(slots=True)
class Answer:
    """One answer, from its events so far."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    phase: Phase | None = None
    """The phase of the latest text."""
    begun_calls: dict[int, CallSoFar] = field(default_factory=dict)
    """The calls by their numbers, with those that were cut off."""
    has_built_in_call: bool = False
    repairs: list[Repaired] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    counts: TokenCounts = field(default_factory=TokenCounts)
    finished: Finished | None = None

    def add(self, event: Event) -> None:
        match event:
            case TextDelta():
                self.texts.append(event.separated)
                self.phase = event.phase
            case ReasoningDelta():
                self.reasoning.append(event.separated)
            case ToolCallStarted(_, call, id, name, extra):
                self.begun_calls[call] = CallSoFar(id, name, extra)
            case ToolCallDelta(_, call, arguments):
                self.begun_calls[call].arguments.append(arguments)
            case ToolCallFinished(_, call):
                self.begun_calls[call].is_finished = True
            case BuiltInCall():
                self.has_built_in_call = True
            case Repaired():
                self.repairs.append(event)
            case Violation():
                self.violations.append(event)
            case Finished():
                self.counts, self.finished = event.counts, event

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def thoughts(self) -> str:
        return "".join(self.reasoning)

    @property
    def calls(self) -> list[ToolCall]:
        """The finished calls; one that was cut off is not among them."""
        return [call.as_tool_call() for call in self.begun_calls.values() if call.is_finished]

    @property
    def attempts_call(self) -> bool:
        """Whether it has a call of any kind, be it cut off or of a tool that does not exist."""
        return self.has_built_in_call or bool(self.begun_calls)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.finished.reason if self.finished else None

    @property
    def raw(self) -> tuple[str, ...]:
        return self.finished.raw if self.finished else ()

    def message(self) -> Message:
        """The answer as a later prompt has it."""
        return Message(
            "assistant", self.text, reasoning=self.thoughts or None, tool_calls=tuple(self.calls)
        )


def folded(events: Iterable[Event]) -> Answer:
    answer = Answer()
    for event in events:
        answer.add(event)
    return answer
