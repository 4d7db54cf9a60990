"""What holds a row to its request while it decodes: a grammar of the whole answer, and how long
it may reason. The engine knows neither families nor tools: it is told in tokens.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mlx_server.engine.messages import Generate, Thinking
from mlx_server.errors import BadRequest, InvalidGrammar
from mlx_server.grammars.formats import rule_of
from mlx_server.grammars.lark import Lark
from mlx_server.grammars.schema import check_tools
from mlx_server.messages import Conversation
from mlx_server.parsers.output_spec import Wanted
from mlx_server.parsers.parse_context import Reading
from mlx_server.pool.prepare import Prepared
from mlx_server.prompts.reasoning_effort import SWITCHES
from mlx_server.requests import GenerateRequest, Named, Prompt

PROMPT_END = 64
"""Tokens of a prompt's end that a parser sees as text."""


def reading_of(
    prepared: Prepared, asked: Conversation, prompt: list[int], index: int = 0
) -> Reading:
    tokenizer = prepared.checkpoint.tokenizer
    return Reading(
        index=index,
        tools=asked.tools,
        prompt=tuple(prompt),
        ends_with=tokenizer.raw(prompt[-PROMPT_END:]),
        control=tokenizer.control_tokens,
        repair=prepared.spec.repair,
    )


NO_TOOL = ("tools",)
"""What is left out where there is no grammar that could hold calls."""


def constrain(
    prepared: Prepared, request: GenerateRequest, asked: Prompt, row: Generate
) -> tuple[str, ...]:
    """Sets the row's grammar and budget; returns what of its tools the grammar leaves out. Raises
    InvalidGrammar."""
    if not isinstance(asked, Conversation):  # text is completed by text
        if request.format:
            lark = Lark(prepared.checkpoint.tokenizer.control_tokens)
            row.grammar = lark.source(rule_of(request.format, lark))
        return ()
    budget = budget_of(prepared, request, asked)
    answer = request.max_response_tokens
    if not asked.tools and request.format is None and budget is None and answer is None:
        return ()
    wanted = _wanted(prepared, request, asked, row)
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


def constrain_onward(
    prepared: Prepared, request: GenerateRequest, asked: Conversation, row: Generate
) -> None:
    """Sets the grammar of what is still to come behind its prompt, if it had one before."""
    if row.grammar is not None:  # not Harmony's: no answer ends in its reasoning there
        wanted = _wanted(prepared, request, asked, row)
        row.grammar, _ = _grammar(prepared, request, wanted)


def is_forced(request: GenerateRequest) -> bool:
    """Whether an answer that no grammar holds would not be what was asked for."""
    asked = (prompt for prompt in request.prompts if isinstance(prompt, Conversation))
    is_strict = any(tool.strict for conversation in asked for tool in conversation.tools)
    return request.format is not None or request.tool_choice != "auto" or is_strict


def template_kwargs(prepared: Prepared, asked: Conversation) -> Mapping[str, Any]:
    """The owner's settings of the template hold where the request has none of its own."""
    return {**prepared.spec.template_kwargs, **asked.template_kwargs}


def budget_of(prepared: Prepared, request: GenerateRequest, asked: Conversation) -> int | None:
    if request.thinking_budget is not None:
        return request.thinking_budget
    # the owner's effort means nothing where the client works the template's switch itself
    is_switched = not SWITCHES.keys().isdisjoint(asked.template_kwargs)
    told = asked.template_kwargs if is_switched else template_kwargs(prepared, asked)
    # whatever the template makes of it
    return 0 if told.get("reasoning_effort") == "none" else None


def _wanted(
    prepared: Prepared, request: GenerateRequest, asked: Conversation, row: Generate
) -> Wanted:
    return Wanted(
        reading=reading_of(prepared, asked, row.prompt),
        choice=request.tool_choice,
        format=request.format,
        thinks=prepared.family.thinks(prepared.checkpoint),
    )


def _grammar(
    prepared: Prepared, request: GenerateRequest, wanted: Wanted
) -> tuple[str | None, tuple[str, ...]]:
    """And what it leaves out of the tools' schemas."""
    if is_forced(request):
        return _held(prepared, wanted)
    by_default = prepared.transcript is None
    if not (by_default if prepared.spec.constrain_calls is None else prepared.spec.constrain_calls):
        return None, ()
    try:
        return _held(prepared, wanted)
    except InvalidGrammar:  # nobody asked for more than what the model does by itself
        return None, NO_TOOL


def _held(prepared: Prepared, wanted: Wanted) -> tuple[str | None, tuple[str, ...]]:
    check_tools(wanted.reading.tools)
    grammar = prepared.family.grammar(wanted)
    if grammar is None and wanted.must_call:
        raise BadRequest(
            f"`tool_choice` can't be kept: {prepared.id} is of the family {prepared.family.name}, "
            "which has no way to call a tool. Leave it out, or ask a model of another family.",
            param="tool_choice",
        )
    return grammar, tuple(_left_out(prepared, wanted)) if grammar else ()


def _left_out(prepared: Prepared, wanted: Wanted) -> Iterator[str]:
    for tool in wanted.reading.tools:
        may_be_called = wanted.choice in ("auto", "required", Named(tool.name))
        if may_be_called and not tool.strict:
            for gap in prepared.family.unheld(tool):
                yield f"tools.{tool.name}: {gap}"


def _thinking(prepared: Prepared, wanted: Wanted, end: str, budget: int | None) -> Thinking | None:
    """end: what leads from reasoning to the answer."""
    family, tokenizer = prepared.family, prepared.checkpoint.tokenizer
    opens, closes = family.thinking_marks()
    if not closes:
        return None
    before, behind = _parted(end, closes)
    lead, rest = tokenizer.encode(before), tokenizer.encode(behind)
    if budget is not None and len(lead) >= budget:  # room for reasoning, or what leads out of it
        lead = []
    return Thinking(
        budget=None if budget is None else budget - len(lead),
        inside=family.make_parser(wanted.reading).place == "reasoning",
        opens=[tokenizer.marked(mark) for mark in opens],
        closes=[tokenizer.marked(mark) for mark in closes],
        end=lead + rest,
    )


def _parted(end: str, closes: tuple[str, ...]) -> tuple[str, str]:
    """What stands before the first of these marks, which is reasoning still, and the rest."""
    at = min((end.find(mark) for mark in closes if mark in end), default=0)
    return end[:at], end[at:]
