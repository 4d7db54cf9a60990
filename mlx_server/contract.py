"""What holds a row to its request while it decodes: a grammar of the whole answer, and how long
it may reason. The engine knows neither families nor tools: it is told in tokens.
"""

from contextlib import suppress

from mlx_server.engine.messages import Generate, Thinking
from mlx_server.errors import InvalidGrammar
from mlx_server.grammars.formats import rule_of
from mlx_server.grammars.lark import Lark
from mlx_server.grammars.schema import check_tools
from mlx_server.messages import Conversation
from mlx_server.parsers.reading import Reading
from mlx_server.parsers.wanted import Wanted
from mlx_server.pool.prepare import Prepared
from mlx_server.requests import GenerateRequest, Prompt

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


def constrain(prepared: Prepared, request: GenerateRequest, asked: Prompt, row: Generate) -> None:
    """Sets the row's grammar and budget. Raises InvalidGrammar."""
    if not isinstance(asked, Conversation):  # text is completed by text
        if request.format:
            lark = Lark(prepared.checkpoint.tokenizer.control_tokens)
            row.grammar = lark.source(rule_of(request.format, lark))
        return
    budget = _budget(request, asked)
    answer = request.max_response_tokens
    if not asked.tools and request.format is None and budget is None and answer is None:
        return
    wanted = Wanted(
        reading=reading_of(prepared, asked, row.prompt),
        choice=request.tool_choice,
        format=request.format,
        thinks=prepared.family.thinks(prepared.checkpoint),
    )
    row.grammar = _grammar(prepared, request, asked, wanted)
    if budget is not None or answer is not None:
        end = prepared.family.end_of_reasoning(wanted)
        # a grammar has its own say on the space behind
        row.thinking = _thinking(prepared, wanted, end.rstrip() if row.grammar else end, budget)
    if row.thinking:
        row.thinking.answer = answer
    elif answer is not None:  # it is all that there will be
        row.end_within(answer)


def is_forced(request: GenerateRequest) -> bool:
    """Whether an answer that no grammar holds would not be what was asked for."""
    return request.format is not None or request.tool_choice != "auto"


def _budget(request: GenerateRequest, asked: Conversation) -> int | None:
    if request.thinking_budget is not None:
        return request.thinking_budget
    # whatever the template makes of it
    return 0 if asked.template_kwargs.get("reasoning_effort") == "none" else None


def _grammar(
    prepared: Prepared, request: GenerateRequest, asked: Conversation, wanted: Wanted
) -> str | None:
    if is_forced(request) or any(tool.strict for tool in asked.tools):
        check_tools(asked.tools)
        return prepared.family.grammar(wanted)
    by_default = prepared.transcript is None
    if not (by_default if prepared.spec.constrain_calls is None else prepared.spec.constrain_calls):
        return None
    with suppress(InvalidGrammar):  # nobody asked for more than what the model does by itself
        check_tools(asked.tools)
        return prepared.family.grammar(wanted)
    return None


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
