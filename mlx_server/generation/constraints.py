"""What holds a row to its request while it decodes: a grammar of the whole answer, and how long
it may reason. The engine knows neither families nor tools: it is told in tokens.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mlx_server.engine.messages import Generate, Thinking
from mlx_server.errors import BadRequest, InvalidGrammar
from mlx_server.grammars.formats import format_rule
from mlx_server.grammars.lark import Lark
from mlx_server.grammars.schema import check_tools
from mlx_server.messages import Conversation
from mlx_server.parsers.output_spec import OutputSpec
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.pool.prepare import PreparedModel
from mlx_server.prompts.reasoning_effort import SWITCHES
from mlx_server.requests import GenerateRequest, NamedTool, Prompt

PROMPT_END = 64
"""Tokens of a prompt's end that a parser sees as text."""


def parse_context(
    prepared: PreparedModel, conversation: Conversation, prompt: list[int], index: int = 0
) -> ParseContext:
    tokenizer = prepared.checkpoint.tokenizer
    return ParseContext(
        index=index,
        tools=conversation.tools,
        prompt=tuple(prompt),
        ends_with=tokenizer.raw(prompt[-PROMPT_END:]),
        control=tokenizer.control_tokens,
        repair=prepared.spec.repair,
    )


NO_TOOL = ("tools",)
"""What is left out where there is no grammar that could hold calls."""


def constrain(
    prepared: PreparedModel, request: GenerateRequest, prompt: Prompt, row: Generate
) -> tuple[str, ...]:
    """Sets the row's grammar and budget; returns what of its tools the grammar leaves out. Raises
    InvalidGrammar."""
    if not isinstance(prompt, Conversation):  # text is completed by text
        if request.format:
            lark = Lark(prepared.checkpoint.tokenizer.control_tokens)
            row.grammar = lark.source(format_rule(request.format, lark))
        return ()
    budget = budget_of(prepared, request, prompt)
    answer = request.max_response_tokens
    if not prompt.tools and request.format is None and budget is None and answer is None:
        return ()
    wanted = _output_spec(prepared, request, prompt, row)
    row.grammar, left_out = _grammar(prepared, request, wanted)
    if budget is not None or answer is not None:
        end = prepared.family.end_of_reasoning(wanted)
        # a grammar has its own say on the space behind
        row.thinking = _thinking(prepared, wanted, end.rstrip() if row.grammar else end, budget)
    if row.thinking:
        row.thinking.answer = answer
    elif answer is not None:  # it is all that there will be
        row.end_within(answer)
    return left_out


def constrain_continuation(
    prepared: PreparedModel, request: GenerateRequest, conversation: Conversation, row: Generate
) -> None:
    """Sets the grammar of what is still to come behind its prompt, if it had one before."""
    if row.grammar is not None:  # not Harmony's: no answer ends in its reasoning there
        wanted = _output_spec(prepared, request, conversation, row)
        row.grammar, _ = _grammar(prepared, request, wanted)


def is_format_required(request: GenerateRequest) -> bool:
    """Whether an answer that no grammar holds would not be what was asked for."""
    asked = (prompt for prompt in request.prompts if isinstance(prompt, Conversation))
    is_strict = any(tool.strict for conversation in asked for tool in conversation.tools)
    return request.format is not None or request.tool_choice != "auto" or is_strict


def template_kwargs(prepared: PreparedModel, conversation: Conversation) -> Mapping[str, Any]:
    """The owner's settings of the template hold where the request has none of its own."""
    return {**prepared.spec.template_kwargs, **conversation.template_kwargs}


def budget_of(
    prepared: PreparedModel, request: GenerateRequest, conversation: Conversation
) -> int | None:
    if request.thinking_budget is not None:
        return request.thinking_budget
    # the owner's effort means nothing where the client works the template's switch itself
    is_switched = not SWITCHES.keys().isdisjoint(conversation.template_kwargs)
    told = conversation.template_kwargs if is_switched else template_kwargs(prepared, conversation)
    # whatever the template makes of it
    return 0 if told.get("reasoning_effort") == "none" else None


def _output_spec(
    prepared: PreparedModel, request: GenerateRequest, conversation: Conversation, row: Generate
) -> OutputSpec:
    return OutputSpec(
        context=parse_context(prepared, conversation, row.prompt),
        choice=request.tool_choice,
        format=request.format,
        thinks=prepared.family.thinks(prepared.checkpoint),
    )


def _grammar(
    prepared: PreparedModel, request: GenerateRequest, spec: OutputSpec
) -> tuple[str | None, tuple[str, ...]]:
    """And what it leaves out of the tools' schemas."""
    if is_format_required(request):
        return _required_grammar(prepared, spec)
    by_default = prepared.transcript is None
    if not (by_default if prepared.spec.constrain_calls is None else prepared.spec.constrain_calls):
        return None, ()
    try:
        return _required_grammar(prepared, spec)
    except InvalidGrammar:  # nobody asked for more than what the model does by itself
        return None, NO_TOOL


def _required_grammar(
    prepared: PreparedModel, spec: OutputSpec
) -> tuple[str | None, tuple[str, ...]]:
    check_tools(spec.context.tools)
    grammar = prepared.family.grammar(spec)
    if grammar is None and spec.must_call:
        raise BadRequest(
            f"`tool_choice` can't be kept: {prepared.id} is of the family {prepared.family.name}, "
            "which has no way to call a tool. Leave it out, or ask a model of another family.",
            param="tool_choice",
        )
    return grammar, tuple(_unenforced(prepared, spec)) if grammar else ()


def _unenforced(prepared: PreparedModel, spec: OutputSpec) -> Iterator[str]:
    for tool in spec.context.tools:
        may_be_called = spec.choice in ("auto", "required", NamedTool(tool.name))
        if may_be_called and not tool.strict:
            for gap in prepared.family.unsupported_keywords(tool):
                yield f"tools.{tool.name}: {gap}"


def _thinking(
    prepared: PreparedModel, spec: OutputSpec, end: str, budget: int | None
) -> Thinking | None:
    """end: what leads from reasoning to the answer."""
    family, tokenizer = prepared.family, prepared.checkpoint.tokenizer
    opens, closes = family.thinking_delimiters()
    if not closes:
        return None
    before, behind = _split_at_delimiter(end, closes)
    lead, rest = tokenizer.encode(before), tokenizer.encode(behind)
    if budget is not None and len(lead) >= budget:  # room for reasoning, or what leads out of it
        lead = []
    return Thinking(
        budget=None if budget is None else budget - len(lead),
        inside=family.make_parser(spec.context).section == "reasoning",
        opens=[tokenizer.marked(mark) for mark in opens],
        closes=[tokenizer.marked(mark) for mark in closes],
        end=lead + rest,
    )


def _split_at_delimiter(end: str, closes: tuple[str, ...]) -> tuple[str, str]:
    """What stands before the first of these marks, which is reasoning still, and the rest."""
    at = min((end.find(mark) for mark in closes if mark in end), default=0)
    return end[:at], end[at:]
