"""`POST /v1/chat/completions` on the wire, as OpenAI documents it, and the request it makes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from mlx_server import limits
from mlx_server.api import formats
from mlx_server.api.content import (
    Content,
    TextPart,
    part_text,
    parts_of,
    thoughts_of,
    unused_thoughts,
)
from mlx_server.api.fields import (
    EMPTY_IS_UNSET,
    ROLES,
    UNKNOWN_ROLE,
    USUAL_VERBOSITY,
    WHOLE,
    Arguments,
    ContinuationBody,
    DescribedFunction,
    Effort,
    GenerationBody,
    Items,
    MaxTokens,
    OtherTool,
    ResponseTokens,
    RoleName,
    Text,
    ThinkingBody,
    ThinkingTokens,
    Verbosity,
    WireModel,
    by_type,
    check_choice,
    check_number,
    check_offered,
    check_stream_options,
    check_usable,
    role_of,
)
from mlx_server.api.formats import ConstrainedBody
from mlx_server.api.freeform import FreeformText, TextGrammar, arguments_of_text, freeform_tool
from mlx_server.api.histories import MENDED, with_answered_calls
from mlx_server.errors import BadRequest
from mlx_server.messages import (
    INSTRUCTION_ROLES,
    UNNAMED,
    Conversation,
    Message,
    Tool,
    ToolCall,
    content_of,
    media_parts,
)
from mlx_server.requests import GenerateRequest, NamedTool, ToolChoice


class FunctionCall(WireModel):
    """An earlier call. A model may have written no name, and any arguments."""

    ACCEPTED = frozenset({"index"})

    name: Text = None
    arguments: Arguments = None


class FunctionCallParam(WireModel):
    ACCEPTED = frozenset({"index"})

    id: Text = None
    type: Text = None
    function: FunctionCall | None = None
    extra_content: dict[str, Any] | None = None
    """What an upstream sent with the call, such as Gemini's signature."""

    def call(self) -> ToolCall:
        function = self.function or FunctionCall()
        name, arguments = function.name or UNNAMED, function.arguments or ""
        return ToolCall(self.id or "", name, arguments, extra_content=self.extra_content)


class FreeformCall(WireModel):
    name: Text = None
    input: Text = None


class FreeformCallParam(WireModel):
    """A call of a tool whose input is free text."""

    id: Text = None
    type: Literal["custom"]
    custom: FreeformCall | None = None
    extra_content: dict[str, Any] | None = None

    def call(self) -> ToolCall:
        custom = self.custom
        arguments = arguments_of_text(custom.input or "") if custom else ""
        name = (custom and custom.name) or UNNAMED
        return ToolCall(self.id or "", name, arguments, extra_content=self.extra_content)


ToolCallParam = Annotated[
    Annotated[FunctionCallParam, Tag("<function>")] | Annotated[FreeformCallParam, Tag("<custom>")],
    by_type("custom", otherwise="function"),
]

ASSISTANT = (
    *("reasoning", "reasoning_content", "reasoning_details", "refusal"),
    *("tool_calls", "function_call", "prefix", "partial"),
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
    prefix: bool | None = None
    """Whether the answer continues this last message, as in Mistral's and DeepSeek's APIs."""
    partial: bool | None = None
    """Moonshot's and Qwen's name of `prefix`."""
    tools: "Items[MessageToolParam] | None" = None
    """Of a system message, as in Kimi K3's API: tools that are added to those of the request."""

    @property
    def adds_tools(self) -> bool:
        return bool(self.tools) and self.role in INSTRUCTION_ROLES

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
        if self.tools and not self.adds_tools:
            yield "tools"
        if self.refusal and self.content:
            yield "refusal"
        if self.tool_calls and self.function_call:
            yield "function_call"
        if role == "assistant" and self.reasoning_details and not self.tool_calls:
            yield "reasoning_details"
        if self.reasoning and self.reasoning_content not in (None, self.reasoning):
            yield "reasoning"


class FunctionParam(DescribedFunction):
    strict: bool | None = None


class FunctionToolParam(WireModel):
    type: Literal["function"] = "function"  # Mistral's clients leave it out
    function: FunctionParam


MessageToolParam = Annotated[
    Annotated[FunctionToolParam, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")],
    by_type("function", untyped="function"),
]


class ChatMessagesBody(ContinuationBody):
    messages: Annotated[Items[MessageParam], Field(min_length=1), MENDED]

    def continues(self) -> bool:
        last = self.messages[-1]
        is_begun = role_of(last.role) == "assistant" and bool(last.prefix or last.partial)
        return super().continues() or is_begun

    def with_added(self, tools: Iterable[Tool]) -> tuple[Tool, ...]:
        """The tools, and those that messages add. Of one that is added again the last definition
        counts, in the place of the first."""
        added = self.added_tools()
        return (*(added.pop(tool.name, tool) for tool in tools), *added.values())

    def added_tools(self) -> dict[str, Tool]:
        params = (
            each for message in self.messages if message.adds_tools for each in message.tools or ()
        )
        tools = (_tool(each) for each in params if isinstance(each, FunctionToolParam))
        return {tool.name: tool for tool in tools}


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


ToolParam = Annotated[
    Annotated[FunctionToolParam, Tag("<function>")]
    | Annotated[FreeformToolParam, Tag("<custom>")]
    | Annotated[OtherTool, Tag("<other>")],
    by_type("function", "custom", untyped="function"),
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
    by_type("custom", otherwise="function"),
]


class AllowedTools(WireModel):
    mode: Literal["auto", "required"]
    tools: Annotated[Items[AllowedTool], Field(min_length=1, max_length=limits.TOOLS)]


class AllowedToolsChoice(WireModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoiceParam = (
    Literal["none", "auto", "required", "any"]  # Mistral's clients say "any" for "required"
    | Annotated[FunctionChoice | FreeformChoice | AllowedToolsChoice, Field(discriminator="type")]
)


class EffortParam(WireModel):
    """OpenRouter's `reasoning`, which says in one object what other APIs have fields for."""

    effort: Effort = None
    max_tokens: ThinkingTokens | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """Whether reasoning is left out of the answer."""


class PredictionParam(WireModel):
    """What the answer is expected to be like."""

    type: Literal["content"]
    content: str | Items[TextPart]

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text or "" for part in parts)


class ChatBody(ConstrainedBody, ThinkingBody, ChatMessagesBody):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **GenerationBody.UNSUPPORTED,
        "audio": "these models answer in text",
        "web_search_options": "this server has no web search",
        "functions": "send `tools` instead",
        "function_call": "send `tool_choice` instead",
    }

    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.TOP_LOGPROBS), WHOLE] | None = None
    tools: Annotated[Items[ToolParam], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: Annotated[ToolChoiceParam | None, EMPTY_IS_UNSET] = None
    parallel_tool_calls: bool | None = None
    modalities: Items[str] | None = None
    reasoning_effort: Effort = None
    reasoning: EffortParam | None = None
    include_reasoning: bool | None = None
    """vLLM's name, and OpenRouter's older one, for whether the answer shows its reasoning."""
    verbosity: Verbosity | None = None
    max_response_tokens: ResponseTokens | None = None
    prediction: PredictionParam | None = None
    metadata: dict[str, Any] | None = None
    """The labels of a stored completion are checked; other clients may put anything here."""

    def unused(self) -> Iterable[str]:
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
        by_object = self.reasoning_effort is None and self.reasoning and self.reasoning.effort
        return "reasoning.effort" if by_object else "reasoning_effort"

    def switches(self) -> dict[str, bool]:
        switches = super().switches()
        if self.reasoning and self.reasoning.enabled is not None:
            switches["reasoning.enabled"] = self.reasoning.enabled
        return switches

    def budgets(self) -> dict[str, int]:
        budgets = super().budgets()
        if self.reasoning and self.reasoning.max_tokens is not None:
            budgets["reasoning.max_tokens"] = self.reasoning.max_tokens
        return budgets

    @property
    def freeform_names(self) -> frozenset[str]:
        """The names of the tools whose input is free text."""
        tools = self.tools or ()
        return frozenset(tool.custom.name for tool in tools if isinstance(tool, FreeformToolParam))


def messages(params: Iterable[MessageParam]) -> Iterator[Message]:
    said = ((i, each) for i, each in enumerate(params) if each.content or not each.adds_tools)
    return with_answered_calls(_message(message, i) for i, message in said)


def _message(message: MessageParam, place: int) -> Message:
    parts = parts_of(message.content, f"messages[{place}].content")
    return Message(
        role=role_of(message.role),
        content=content_of(parts) or message.refusal or "",
        name=message.name,
        reasoning=_reasoning(message),
        tool_calls=_calls(message, place),
        tool_call_id=message.tool_call_id or None,
        parts=media_parts(parts),
    )


def _reasoning(message: MessageParam) -> str | None:
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is None or isinstance(reasoning, str):
        return reasoning or "\n\n".join(thoughts_of(message.content)) or None
    return part_text({"content": reasoning})


def _calls(message: MessageParam, place: int) -> tuple[ToolCall, ...]:
    calls = tuple(_with_details((call.call() for call in message.tool_calls or ()), message))
    if calls or (function := message.function_call) is None:
        return calls
    return (ToolCall(f"function_call_{place}", function.name or UNNAMED, function.arguments or ""),)


def _with_details(calls: Iterable[ToolCall], message: MessageParam) -> Iterator[ToolCall]:
    """The calls, of which the first has the details of the reasoning before it."""
    details = {"reasoning_details": given} if (given := message.reasoning_details) else {}
    for call in calls:
        extra = {**(call.extra_content or {}), **details}
        yield replace(call, extra_content=extra) if details else call
        details = {}


def to_request(body: ChatBody) -> GenerateRequest:
    check_stream_options(body.stream, body.stream_options)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    if body.modalities and body.modalities != ["text"]:
        raise BadRequest('`modalities` should be `["text"]`.', param="modalities")
    tools, tool_choice = _tools(body)
    constrained = body.constrained()
    conversation = Conversation(
        messages=tuple(messages(body.messages)),
        tools=tools,
        template_kwargs=body.template_kwargs(),
        response_format=formats.prompt_description(constrained["format"]),
        continue_final_message=body.continues(),
    )
    return GenerateRequest(
        model=body.model,
        **body.shared_fields(),
        buffered=not body.stream,
        progress=body.wants_progress,
        **constrained,
        prompts=(conversation,),
        n=body.n or 1,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        tool_choice=tool_choice,
        thinking_budget=body.budget(),
        prediction=body.prediction.text if body.prediction else "",
        implied=body.implied_sampling(),
        param_names=body.param_names(),
        max_response_tokens=body.max_response_tokens,
        parallel_calls=body.parallel_tool_calls is not False,
    )


def _tools(body: ChatBody) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that the model may call, and whether it has to call one."""
    usable = [tool for tool in body.tools or () if not isinstance(tool, OtherTool)]
    given = tuple(map(_tool, usable))
    tools = body.with_added(given)
    if not tools and body.tool_choice != "none":
        check_usable([tool.type for tool in body.tools or ()])
    check_number(tools)
    _refuse_shared_names(body, (*given, *body.added_tools().values()))
    match body.tool_choice:
        case AllowedToolsChoice(allowed_tools=allowed):
            names = {choice.name for choice in allowed.tools}
            for name in names:
                check_offered(name, tools)
            return tuple(tool for tool in tools if tool.name in names), allowed.mode
        case FunctionChoice() | FreeformChoice() as named:
            choice: ToolChoice = NamedTool(named.name)
        case "any":
            choice = "required"
        case mode:
            choice = mode or "auto"
    check_choice(choice, tools)
    return tools, choice


def _refuse_shared_names(body: ChatBody, tools: Sequence[Tool]) -> None:
    """Raises BadRequest if a function has the name of a custom tool: calls could mean either."""
    names = Counter(tool.name for tool in tools)
    for name in body.freeform_names:
        if names[name] > 1:
            raise BadRequest(
                f"Two `tools` have the name {name[:64]!r}: give each its own.", param="tools"
            )


def _tool(tool: FunctionToolParam | FreeformToolParam) -> Tool:
    if isinstance(tool, FreeformToolParam):
        format = tool.custom.format
        grammar = format.grammar if isinstance(format, GrammarParam) else None
        return freeform_tool(tool.custom.name, tool.custom.description, grammar)
    return tool.function.tool(strict=bool(tool.function.strict))
