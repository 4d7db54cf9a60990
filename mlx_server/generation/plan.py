"""Plans a request: the rows that the engine will generate, and the memory they need."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_server import limits
from mlx_server.engine.messages import Generate
from mlx_server.errors import BadRequest, ContextTooLong
from mlx_server.families.base import RenderedPrompt
from mlx_server.generation.constraints import NO_TOOL, budget_of, constrain, template_kwargs
from mlx_server.grammars.formats import check, unenforced
from mlx_server.messages import Conversation
from mlx_server.pool.adapters import LeasedAdapter
from mlx_server.pool.lease import MemoryDemand
from mlx_server.pool.prepare import PreparedModel
from mlx_server.prompts.text_size import characters_of
from mlx_server.request_threads import check_wanted
from mlx_server.requests import (
    GenerateRequest,
    JsonFormat,
    Prompt,
    SamplingChoices,
    SamplingParams,
)
from mlx_server.sources.transcript import TranscriptEntry

CHARACTERS_PER_TOKEN = 16
"""More than any text has on average: a text with more per token can't fit the context."""


@dataclass(frozen=True)
class RequestPlan:
    rows: list[Generate]
    prompt_tokens: int
    demand: MemoryDemand
    ignored: tuple[str, ...]
    unenforced: tuple[str, ...]
    """Paths of the schema keywords that no grammar enforces."""
    unchecked: bool
    """Whether some of them concern the answer's text, which must then be checked afterwards."""
    messages: tuple[Mapping[str, Any], ...]
    """The prompts as messages of the family's own library, if requested."""

    def without_constraints(self) -> "RequestPlan":
        for row in self.rows:
            row.grammar = None
        return replace(self, unenforced=NO_TOOL)


def plan(
    prepared: PreparedModel, request: GenerateRequest, adapter: LeasedAdapter | None = None
) -> RequestPlan:
    """Plan the request. Call it in a thread: rendering and tokenising long prompts takes time."""
    _check_text(prepared, request)
    if request.format:
        check(request.format, request.format_param)
    check_wanted()
    prompts = [_rendered(prepared, prompt) for prompt in request.prompts]
    check_wanted()
    pairs = list(zip(request.prompts, prompts, strict=True))
    planned = [_rows(prepared, request, prompt, r.tokens) for prompt, r in pairs]
    rows = [row for those, _ in planned for row in those]
    if adapter:
        for row in rows:
            row.adapter, row.adapter_scale = adapter.spec.digest, request.adapter_scale
    of_text = unenforced(request.format) if request.format else ()
    of_tools = dict.fromkeys(name for _, left_out in planned for name in left_out)
    ignored = (name for prompt, r in pairs for name in _ignored(prepared, request, prompt, r))
    return RequestPlan(
        rows=rows,
        prompt_tokens=sum(len(row.prompt) for row in rows[:: request.n]),
        demand=MemoryDemand(
            prepared.kv,
            max(len(row.prompt) for row in rows),
            max(_longest(prepared, request, row) for row in rows),
            len(rows),
        ),
        ignored=tuple(dict.fromkeys(ignored)),
        unenforced=(*of_text, *of_tools),
        unchecked=bool(of_text),
        messages=tuple(_messages(prepared, prompts)) if request.raw_messages else (),
    )


def shortened(
    planned: RequestPlan, prepared: PreparedModel, request: GenerateRequest, most: int
) -> RequestPlan:
    """The plan with answers that fit into memory, unless the client set a limit of its own.

    `most` is the number of tokens per row that memory has room for. If not even the prompts fit,
    the plan is returned unchanged and the pool refuses the request.
    """
    if request.max_tokens is not None or planned.demand.most_tokens <= most:
        return planned
    if most >= prepared.context_length:
        return planned  # memory has room for a whole context, which limits the row by itself
    answers = 2 if may_retry(prepared, request) else 1
    most_of_each = []
    for row in planned.rows:
        beyond = max(0, _longest(prepared, request, row) - most)
        most_of_each.append(row.max_tokens - -(-beyond // answers))
    if min(most_of_each) < 1:
        return planned
    for row, limit in zip(planned.rows, most_of_each, strict=True):
        row.end_within(limit)
    return replace(planned, demand=replace(planned.demand, most_tokens=most))


def _messages(
    prepared: PreparedModel, prompts: Sequence[RenderedPrompt]
) -> Iterator[Mapping[str, Any]]:
    for rendered in prompts:
        if rendered.messages is None:
            raise BadRequest(
                "`enable_response_messages` needs a model of the family gpt_oss; "
                f"{prepared.id} belongs to the family {prepared.family.name}.",
                param="enable_response_messages",
            )
        yield from rendered.messages()


def retry_row(
    prepared: PreparedModel, request: GenerateRequest, conversation: Conversation, first: Generate
) -> Generate | None:
    """The row that generates a rejected answer again; None if there is no room for it."""
    prompt = _tokens(prepared, conversation).tokens
    room = min(_longest(prepared, request, first), prepared.context_length) - len(prompt)
    if room <= 0:
        return None
    (row,), _ = _rows(prepared, replace(request, n=1), conversation, prompt)
    row.max_tokens, row.overflow_tokens = first.max_tokens, first.overflow_tokens
    row.end_within(room)
    row.adapter, row.adapter_scale = first.adapter, first.adapter_scale
    return row


def _longest(prepared: PreparedModel, request: GenerateRequest, row: Generate) -> int:
    """Upper bound on the row's tokens, including a retry and an answer prefix."""
    once = len(row.prompt) + row.max_tokens
    if not any(isinstance(prompt, Conversation) for prompt in request.prompts):
        return once
    again = row.max_tokens + limits.CORRECTION_TOKENS.value if may_retry(prepared, request) else 0
    # an answer prefix has at most as many tokens as characters
    return once + again + len(prepared.family.answer_prefix)


def may_retry(prepared: PreparedModel, request: GenerateRequest) -> bool:
    """Whether an answer that breaks its format may be generated again."""
    repair = prepared.spec.repair
    is_buffered = request.buffered or repair.streaming == "accumulate"
    return bool(is_buffered and repair.retries and request.format and unenforced(request.format))


def _check_text(prepared: PreparedModel, request: GenerateRequest) -> None:
    """Limit the characters of all the request's fields together, before rendering begins."""
    most = max(limits.PROMPT_CHARACTERS.value, CHARACTERS_PER_TOKEN * prepared.context_length)
    around = characters_of(replace(request, prompts=()))
    for prompt in request.prompts:
        found = around + (len(prompt) if isinstance(prompt, tuple) else characters_of(prompt))
        if found > most:
            raise ContextTooLong(
                f"The request has {found} characters of text, including tools and options. The "
                f"limit for {prepared.id}, with a context of {prepared.context_length} tokens, is "
                f"{most} characters. Shorten the request.",
                param=_param(prompt),
            )


def _param(prompt: Prompt) -> str:
    return "messages" if isinstance(prompt, Conversation) else "prompt"


def _rendered(prepared: PreparedModel, prompt: Prompt) -> RenderedPrompt:
    param = _param(prompt)
    # A prompt that is far too long is refused before a minute is spent on tokenising it.
    _check_length(prepared, _characters(prompt) // prepared.checkpoint.tokenizer.longest, param)
    try:
        rendered = _tokens(prepared, prompt)
    except ContextTooLong as error:
        error.param = param
        raise
    if not rendered.tokens:
        raise BadRequest("The prompt is empty.", param=param)
    _check_length(prepared, len(rendered.tokens), param)
    return rendered


def _check_length(prepared: PreparedModel, tokens: int, param: str) -> None:
    if tokens >= prepared.context_length:
        raise ContextTooLong(
            f"The prompt has at least {tokens} tokens; the context of {prepared.id} is "
            f"{prepared.context_length} tokens, including the answer. Shorten the prompt.",
            param=param,
        )


def _characters(prompt: Prompt) -> int:
    match prompt:
        case Conversation(messages):
            return sum(len(message.content) for message in messages)
        case str():
            return len(prompt)
    return 0


def _tokens(prepared: PreparedModel, prompt: Prompt) -> RenderedPrompt:
    match prompt:
        case Conversation():
            return _chat(prepared, prompt)
        case str():
            tokenizer = prepared.checkpoint.tokenizer
            return RenderedPrompt(tokenizer.encode_prompt(prompt, prepared.context_length))
        case ids:
            return RenderedPrompt(list(ids))


def _chat(prepared: PreparedModel, conversation: Conversation) -> RenderedPrompt:
    completed = replace(conversation, template_kwargs=template_kwargs(prepared, conversation))
    return prepared.family.render(prepared.checkpoint, completed, prepared.context_length)


def _ignored(
    prepared: PreparedModel, request: GenerateRequest, prompt: Prompt, rendered: RenderedPrompt
) -> Iterator[str]:
    """Ignored parameters that the client set; those of models.yaml are not reported."""
    if not isinstance(prompt, Conversation):
        return
    own = prompt.template_kwargs
    budget = budget_of(prepared, request, prompt)
    # the engine enforces these, even if the template does not read them
    enforced = {"thinking_budget"} if request.thinking_budget is not None else set()
    if budget == 0 and own.get("reasoning_effort") == "none":
        enforced.add("reasoning_effort")
    configured = prepared.spec.template_kwargs.keys() - own.keys()
    silent = {f"chat_template_kwargs.{name}" for name in enforced | configured | request.implied}
    yield from (name for name in rendered.ignored if name not in silent)


def _rows(
    prepared: PreparedModel, request: GenerateRequest, source: Prompt, prompt: list[int]
) -> tuple[list[Generate], tuple[str, ...]]:
    """The rows, and what their grammar leaves out of the tools' schemas."""
    left_out: dict[str, None] = {}
    rows = [_row(prepared, request, source, prompt, choice) for choice in range(request.n)]
    for row in rows:
        if row is rows[0] or row.prompt != rows[0].prompt:
            left_out |= dict.fromkeys(constrain(prepared, request, source, row))
        else:
            row.grammar, row.thinking = rows[0].grammar, rows[0].thinking
    return rows, tuple(left_out)


def _row(
    prepared: PreparedModel,
    request: GenerateRequest,
    source: Prompt,
    prompt: list[int],
    choice: int,
) -> Generate:
    room = prepared.context_length - len(prompt)
    limit = min(_limit(prepared, request), room)
    overflow = min(_overflow_tokens(prepared, request), room - limit)
    row = Generate(
        row=0,
        model=prepared.id,
        prompt=prompt,
        max_tokens=limit + overflow,
        overflow_tokens=overflow,
        stop_tokens=sorted(prepared.family.stops(prepared.checkpoint)),
        sampling=_sampling(prepared, request, choice),
        prompt_logprobs=request.echo and (request.logprobs is not None or request.max_tokens == 0),
        client=request.client,
    )
    if prepared.transcript:
        _play_transcript(prepared, row, prepared.transcript.pick(source))
    return row


def _limit(prepared: PreparedModel, request: GenerateRequest) -> int:
    if request.max_tokens is not None:
        return request.max_tokens
    return (
        limits.ANSWER_TOKENS.value if prepared.spec.max_tokens is None else prepared.spec.max_tokens
    )


def _overflow_tokens(prepared: PreparedModel, request: GenerateRequest) -> int:
    """Tokens to complete JSON that models.yaml's limit cuts off; a client's limit is final."""
    if request.max_tokens is not None or not isinstance(request.format, JsonFormat):
        return 0
    limit = _limit(prepared, request)
    return min(
        prepared.spec.repair.continuations * limit, max(0, limits.ANSWER_TOKENS.value - limit)
    )


def _sampling(prepared: PreparedModel, request: GenerateRequest, choice: int) -> SamplingParams:
    """Each parameter comes from the request, else models.yaml, the checkpoint or the default."""
    choices: SamplingChoices = {
        **prepared.checkpoint.sampling,
        **prepared.spec.choices,
        **request.choices,
    }
    return SamplingParams(
        **choices,
        logit_bias=request.logit_bias,
        # each of the n answers has a seed of its own
        seed=None if request.seed is None else request.seed + choice,
        logprobs=request.logprobs,
    )


def _play_transcript(prepared: PreparedModel, row: Generate, entry: TranscriptEntry) -> None:
    """Make the row replay a recorded answer."""
    tokenizer = prepared.checkpoint.tokenizer
    row.prompt = row.prompt + tokenizer.encode(entry.generation_prompt)
    row.delay = entry.delay_ms / 1000
    output = entry.tokens(tokenizer)
    row.forced_tokens = [*output, row.stop_tokens[0]]
    if entry.finish == "length" and output:
        row.end_within(len(output))
