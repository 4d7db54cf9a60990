"""Sets a row's constraints: a grammar of the whole answer, and a reasoning budget.

They are expressed in tokens, since the engine knows neither families nor tools.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mlx_server.engine.messages import Generate, Grammar, Thinking
from mlx_server.errors import BadRequest, CompilerTooSlow, InvalidGrammar
from mlx_server.grammars.formats import format_rule, usable_tools
from mlx_server.grammars.lark import Lark
from mlx_server.messages import Conversation
from mlx_server.parsers.parse_context import OutputSpec, ParseContext
from mlx_server.pool.prepare import PreparedModel, template_kwargs
from mlx_server.prompts.control_token_guard import text_tokens
from mlx_server.prompts.template_capabilities import SWITCHES
from mlx_server.requests import GenerateRequest, NamedTool, Prompt

PROMPT_END = 64
"""The number of the prompt's last tokens whose text a parser gets, to see what is open there."""


def parse_context(
    prepared: PreparedModel, conversation: Conversation, prompt: list[int], index: int = 0
) -> ParseContext:
    tokenizer = prepared.checkpoint.tokenizer
    begun = conversation.continued
    return ParseContext(
        index=index,
        tools=conversation.tools,
        prompt=tuple(prompt),
        ends_with=prepared.family.open_end(prepared.checkpoint, begun)
        if begun
        else tokenizer.raw(prompt[-PROMPT_END:]),
        continues=begun is not None,
        control=tokenizer.control_tokens,
        repair=prepared.spec.repair,
    )


NO_TOOL = ("tools",)
"""What is reported as unenforced if no grammar constrains tool calls."""


def constrain_rows(
    prepared: PreparedModel, request: GenerateRequest, prompt: Prompt, rows: Sequence[Generate]
) -> tuple[str, ...]:
    """Set the constraints of all rows, and return the paths of the tools' schema keywords that
    their grammar does not enforce. Raises InvalidGrammar.

    Rows of the same prompt share their constraints, since a grammar takes time to make.
    """
    left_out: dict[str, None] = {}
    for row in rows:
        if row is rows[0] or row.prompt != rows[0].prompt:
            left_out |= dict.fromkeys(_constrain(prepared, request, prompt, row))
        else:
            _share_constraints(request, rows[0], row)
    return tuple(left_out)


def _constrain(
    prepared: PreparedModel, request: GenerateRequest, prompt: Prompt, row: Generate
) -> tuple[str, ...]:
    """Set the constraints of one row; see `constrain_rows`."""
    if not isinstance(prompt, Conversation):  # a text completion has no reasoning or calls
        if request.format:
            lark = Lark(prepared.checkpoint.tokenizer.control_tokens)
            row.grammar = lark.source(format_rule(request.format, lark))
        return ()
    budget = budget_of(prepared, request, prompt)
    answer = request.max_response_tokens
    if not prompt.tools and request.format is None and budget is None and answer is None:
        return ()
    spec = _output_spec(prepared, request, prompt, row)
    row.grammar, left_out, spec = _grammar(prepared, request, spec)
    if request.format and (begun := prompt.continued):
        row.grammar_prefix = text_tokens(prepared.checkpoint, begun.content)
    if budget is not None or answer is not None:
        end = prepared.family.end_of_reasoning(spec)
        # a grammar has its own rule for the white space after reasoning
        row.thinking = _thinking(prepared, spec, end.rstrip() if row.grammar else end, budget)
    if row.thinking:
        row.thinking.answer = answer
        if row.grammar is not None or prepared.transcript is None:
            row.thinking.rest = prepared.family.grammar_after_reasoning(
                spec, constrains=row.grammar is not None
            )
    elif answer is not None:  # without reasoning the whole row is the answer
        row.end_within(answer)
    return left_out


def _share_constraints(request: GenerateRequest, first: Generate, row: Generate) -> None:
    """Copy the constraints that `_constrain` has set in the first row of the same prompt."""
    row.grammar, row.grammar_prefix = first.grammar, first.grammar_prefix
    row.thinking = first.thinking
    if request.max_response_tokens is not None and row.thinking is None:
        row.end_within(request.max_response_tokens)


def constrain_continuation(
    prepared: PreparedModel, request: GenerateRequest, conversation: Conversation, row: Generate
) -> None:
    """Replace the grammar of a row that continues an answer by one that begins where the new
    prompt ends."""
    if row.grammar is not None:
        conversation = replace(conversation, continue_final_message=False)
        spec = _output_spec(prepared, request, conversation, row)
        row.grammar, *_ = _grammar(prepared, request, spec)


def is_format_required(request: GenerateRequest) -> bool:
    """Whether the request needs a grammar: it has a format, a forced call or a strict tool."""
    chats = (prompt for prompt in request.prompts if isinstance(prompt, Conversation))
    is_strict = any(tool.strict for conversation in chats for tool in conversation.tools)
    return request.format is not None or request.tool_choice != "auto" or is_strict


def budget_of(
    prepared: PreparedModel, request: GenerateRequest, conversation: Conversation
) -> int | None:
    if request.thinking_budget is not None:
        return request.thinking_budget
    # an effort set in models.yaml does not apply if the client sets the template's own switch
    is_switched = not SWITCHES.keys().isdisjoint(conversation.template_kwargs)
    own = conversation.template_kwargs
    kwargs = own if is_switched else template_kwargs(prepared.spec, conversation)
    # "none" applies even if the template does not read the effort
    return 0 if kwargs.get("reasoning_effort") == "none" else None


def _output_spec(
    prepared: PreparedModel, request: GenerateRequest, conversation: Conversation, row: Generate
) -> OutputSpec:
    return OutputSpec(
        context=parse_context(prepared, conversation, row.prompt),
        choice=request.tool_choice,
        format=request.format,
        thinks=prepared.family.thinks(prepared.checkpoint),
    )


Constraint = tuple[Grammar | None, tuple[str, ...], OutputSpec]
"""A grammar, the paths of the tools' schema keywords that it does not enforce, and its spec."""


def _grammar(prepared: PreparedModel, request: GenerateRequest, spec: OutputSpec) -> Constraint:
    if is_format_required(request):
        return _required_grammar(prepared, spec)
    by_default = prepared.transcript is None
    if not (by_default if prepared.spec.constrain_calls is None else prepared.spec.constrain_calls):
        return None, (), spec
    try:
        return _required_grammar(prepared, spec)
    except (InvalidGrammar, CompilerTooSlow):
        # the client requires no format, so the answer is decoded without constraints
        return None, NO_TOOL, spec


def _required_grammar(prepared: PreparedModel, spec: OutputSpec) -> Constraint:
    tools = usable_tools(spec.context.tools)
    spec = replace(spec, context=replace(spec.context, tools=tools))
    grammar = prepared.family.grammar(spec)
    if grammar is None and spec.must_call:
        raise BadRequest(
            f"`tool_choice` requires a tool call, but {prepared.id} belongs to the family "
            f"{prepared.family.name}, which cannot call tools. Leave `tool_choice` out, or use a "
            "model of another family.",
            param="tool_choice",
        )
    return grammar, tuple(_unenforced(prepared, spec)) if grammar else (), spec


def _unenforced(prepared: PreparedModel, spec: OutputSpec) -> Iterator[str]:
    for tool in spec.context.tools:
        may_be_called = spec.choice in ("auto", "required", NamedTool(tool.name))
        if may_be_called and not tool.strict:
            for keyword in (*prepared.family.unsupported_keywords(tool), *tool.unenforced):
                yield f"tools.{tool.name}: {keyword}"


def _thinking(
    prepared: PreparedModel, spec: OutputSpec, end: str, budget: int | None
) -> Thinking | None:
    """The reasoning budget in tokens; None if the family has no reasoning delimiters.

    end: the text that is forced at the end of the budget, up to the beginning of the answer.
    """
    family, tokenizer = prepared.family, prepared.checkpoint.tokenizer
    opens, closes = family.thinking_delimiters()
    if not closes:
        return None
    # the text before the first closing delimiter counts as reasoning
    at = min((end.find(delimiter) for delimiter in closes if delimiter in end), default=0)
    lead, rest = tokenizer.encode(end[:at]), tokenizer.encode(end[at:])
    if budget is not None and len(lead) >= budget:  # the budget has no room for a lead-out
        lead = []
    return Thinking(
        budget=None if budget is None else budget - len(lead),
        inside=family.make_parser(spec.context).section == "reasoning",
        opens=[tokenizer.marked(delimiter) for delimiter in opens],
        closes=[tokenizer.marked(delimiter) for delimiter in closes],
        end=lead + rest,
    )
