"""`POST /v1/chat/completions` on the wire, as OpenAI documents it."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from mlx_server import limits
from mlx_server.api.content import Content, unused_thoughts
from mlx_server.api.continuation import ContinuationBody
from mlx_server.api.fields import (
    USUAL_VERBOSITY,
    WHOLE,
    Arguments,
    Effort,
    GenerationBody,
    Items,
    MaxTokens,
    ResponseTokens,
    Text,
    ThinkingTokens,
    Verbosity,
    WireModel,
)
from mlx_server.api.formats import ConstrainedBody
from mlx_server.api.freeform import FreeformText, TextGrammar
from mlx_server.api.histories import MENDED
from mlx_server.api.roles import ROLES, UNKNOWN_ROLE, RoleName, role_of
from mlx_server.api.thinking import ThinkingBody


class FunctionCall(WireModel):
    """An earlier call. A model may have written no name, and any arguments."""

    name: Text = None
    arguments: Arguments = None


class FunctionCallParam(WireModel):
    ACCEPTED = frozenset({"index"})

    id: Text = None
    type: Text = None
    function: FunctionCall | None = None
    extra_content: dict[str, Any] | None = None
    """What an upstream sent with the call, such as Gemini's signature."""


class FreeformCall(WireModel):
    name: Text = None
    input: Text = None


class FreeformCallParam(WireModel):
    """A call of a tool whose input is free text."""

    id: Text = None
    type: Literal["custom"]
    custom: FreeformCall | None = None
    extra_content: dict[str, Any] | None = None


def _kind(value: Any) -> str:
    """A union tag that is no field name; calls and choices may come without a type."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<custom>" if kind == "custom" else "<function>"


ToolCallParam = Annotated[
    Annotated[FunctionCallParam, Tag("<function>")] | Annotated[FreeformCallParam, Tag("<custom>")],
    Discriminator(_kind),
]

ASSISTANT = (
    *("reasoning", "reasoning_content", "reasoning_details", "refusal"),
    *("tool_calls", "function_call"),
)
ANSWERING = ("tool_call_id",)

Thought = str | dict[str, Any] | list[Any] | None


class MessageParam(WireModel):
    role: RoleName = UNKNOWN_ROLE
    content: Content | None = None
    name: Text = None
    reasoning: Thought = None
    reasoning_content: Thought = None
    reasoning_details: Items[dict[str, Any]] | None = None
    """OpenRouter's, which an upstream sent with calls and needs back with their results."""
    refusal: Text = None
    tool_calls: Items[ToolCallParam] | None = None
    tool_call_id: Text = None
    function_call: FunctionCall | None = None
    """A single call, as it was before `tool_calls`."""

    def unused(self) -> Iterable[str]:
        role = role_of(self.role)
        fields = ASSISTANT if role == "assistant" else ANSWERING if role == "tool" else ()
        for name in (*ASSISTANT, *ANSWERING):
            if name not in fields and getattr(self, name):
                yield name
        if self.role not in ROLES:
            yield "role"
        if role != "assistant":
            yield from unused_thoughts(self.content)
        if self.refusal and self.content:
            yield "refusal"
        if self.tool_calls and self.function_call:
            yield "function_call"
        if role == "assistant" and self.reasoning_details and not self.tool_calls:
            yield "reasoning_details"
        if self.reasoning and self.reasoning_content not in (None, self.reasoning):
            yield "reasoning"


class FunctionParam(WireModel):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionToolParam(WireModel):
    type: Literal["function"]
    function: FunctionParam


class GrammarParam(WireModel):
    type: Literal["grammar"]
    grammar: TextGrammar


class FreeformParam(WireModel):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    format: Annotated[FreeformText | GrammarParam, Field(discriminator="type")] | None = None


class FreeformToolParam(WireModel):
    """A tool whose input is free text."""

    type: Literal["custom"]
    custom: FreeformParam


class OtherToolParam(WireModel):
    """A tool that another provider runs, which its clients offer to every server."""

    type: str

    def ignored_as(self) -> str:
        return self.type


def _kind_of_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    is_other = isinstance(kind, str) and kind not in ("function", "custom")
    return "<other>" if is_other else _kind(value)


ToolParam = Annotated[
    Annotated[FunctionToolParam, Tag("<function>")]
    | Annotated[FreeformToolParam, Tag("<custom>")]
    | Annotated[OtherToolParam, Tag("<other>")],
    Discriminator(_kind_of_tool),
]


class FunctionName(WireModel):
    name: Annotated[str, Field(min_length=1)]


class FunctionChoice(WireModel):
    type: Literal["function"]
    function: FunctionName

    @property
    def name(self) -> str:
        return self.function.name


class FreeformChoice(WireModel):
    type: Literal["custom"]
    custom: FunctionName

    @property
    def name(self) -> str:
        return self.custom.name


AllowedTool = Annotated[
    Annotated[FunctionChoice, Tag("<function>")] | Annotated[FreeformChoice, Tag("<custom>")],
    Discriminator(_kind),
]


class AllowedTools(WireModel):
    mode: Literal["auto", "required"]
    tools: Annotated[Items[AllowedTool], Field(min_length=1, max_length=limits.TOOLS)]


class AllowedToolsChoice(WireModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoiceParam = (
    Literal["none", "auto", "required"]
    | Annotated[FunctionChoice | FreeformChoice | AllowedToolsChoice, Field(discriminator="type")]
)


class EffortParam(WireModel):
    """OpenRouter's `reasoning`, which says in one object what other APIs have fields for."""

    effort: Effort | None = None
    max_tokens: ThinkingTokens | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """Whether reasoning is left out of the answer."""


class ChatBody(ConstrainedBody, ThinkingBody, ContinuationBody):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **GenerationBody.UNSUPPORTED,
        "audio": "these models answer in text",
        "prediction": "predicted outputs are not supported",
        "web_search_options": "this server has no web search",
    }

    messages: Annotated[Items[MessageParam], Field(min_length=1), MENDED]
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.TOP_LOGPROBS), WHOLE] | None = None
    tools: Annotated[Items[ToolParam], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Items[FunctionParam], Field(max_length=limits.TOOLS)] | None = None
    """`tools` as they were before; calls are then answered as `function_call`, one at a time."""
    function_call: Literal["none", "auto"] | FunctionName | None = None
    modalities: Items[str] | None = None
    reasoning_effort: Effort | None = None
    reasoning: EffortParam | None = None
    include_reasoning: bool | None = None
    """vLLM's name, and OpenRouter's older one, for whether the answer shows its reasoning."""
    verbosity: Verbosity | None = None
    max_response_tokens: ResponseTokens | None = None
    echo: bool | None = None
    """vLLM's: if the last message is the assistant's, the answer begins with its text."""
    metadata: dict[str, Any] | None = None
    """The labels of a stored completion are checked; other clients may put anything here."""

    def unused(self) -> Iterable[str]:
        if self.echo and self.messages[-1].role != "assistant":
            yield "echo"
        if self.verbosity not in (None, USUAL_VERBOSITY):
            yield "verbosity"
        if self.max_completion_tokens and self.max_tokens not in (None, self.max_completion_tokens):
            yield "max_tokens"
        effort = (self.chat_template_kwargs or {}).get("reasoning_effort")
        if self.reasoning_effort and effort not in (None, self.reasoning_effort):
            yield "reasoning_effort"
        if self.reasoning and self.reasoning.effort not in (None, self.effort):
            yield "reasoning.effort"

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)

    @property
    def hides_reasoning(self) -> bool:
        return self.include_reasoning is False or bool(self.reasoning and self.reasoning.exclude)

    @property
    def effort_param(self) -> str:
        """The name of the effort parameter that the client used."""
        by_object = self.reasoning_effort is None and self.reasoning and self.reasoning.effort
        return "reasoning.effort" if by_object else "reasoning_effort"

    def switches(self) -> dict[str, bool]:
        found = super().switches()
        if self.reasoning and self.reasoning.enabled is not None:
            found["reasoning.enabled"] = self.reasoning.enabled
        return found

    def budgets(self) -> dict[str, int]:
        found = super().budgets()
        if self.reasoning and self.reasoning.max_tokens is not None:
            found["reasoning.max_tokens"] = self.reasoning.max_tokens
        return found

    @property
    def freeform_names(self) -> frozenset[str]:
        """The names of the tools whose input is free text."""
        tools = self.tools or ()
        return frozenset(tool.custom.name for tool in tools if isinstance(tool, FreeformToolParam))

    @property
    def is_legacy(self) -> bool:
        """Whether the client knows `functions` and not `tools`."""
        return self.functions is not None or self.function_call is not None
