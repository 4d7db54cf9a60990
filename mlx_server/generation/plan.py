"""Plans a request: the rows that the engine will generate, and the memory they need."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from mlx_server import limits
from mlx_server.engine.messages import Generate, RowLeftGrammar
from mlx_server.errors import BadRequest, ContextTooLong, NoRecording, RecordingLeftGrammar
from mlx_server.generation.constraints import (
    NO_TOOL,
    budget_of,
    constrain_rows,
)
from mlx_server.generation.rendering import (
    check_media,
    check_text,
    infill_tokens,
    render,
    tokenized,
    tool_output_tokens,
    without_volatile_lines,
)
from mlx_server.grammars.formats import check, unenforced
from mlx_server.messages import (
    EXTRA_CONTENT,
    Conversation,
    characters_of,
    has_extra_content,
)
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.pool.adapters import LeasedAdapter
from mlx_server.pool.lease import MemoryDemand
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import PreparedModel, Task, sampling, token_limit
from mlx_server.prompts.continuation import check_continued, with_open_reasoning
from mlx_server.prompts.control_token_guard import text_tokens
from mlx_server.prompts.template_prompt import RenderedPrompt
from mlx_server.request_threads import check_wanted, in_thread
from mlx_server.requests import (
    GenerateRequest,
    Infill,
    JsonFormat,
    NamedTool,
    Prompt,
)
from mlx_server.sources.transcript import Recording
from mlx_server.system.logs import log_model

log = logging.getLogger(__name__)

UNLIMITED = 2**53
"""A context length that no prompt reaches, for prompts that are only counted."""


@dataclass(frozen=True)
class RequestPlan:
    rows: list[Generate]
    prompt_tokens: int
    demand: MemoryDemand
    ignored: tuple[str, ...]
    unenforced: tuple[str, ...]
    """Paths of the schema keywords that no grammar enforces."""
    unchecked: bool
    """Whether some of these keywords concern the answer's text, which is then checked when it is
    complete."""
    tool_output_tokens: int = 0
    """Tokens of the tool results at the end of the prompts."""

    def without_constraints(self) -> "RequestPlan":
        for row in self.rows:
            row.grammar = None
            if row.thinking:
                row.thinking.rest = None
        return replace(self, unenforced=NO_TOOL)


def plan(
    prepared: PreparedModel, request: GenerateRequest, adapter: LeasedAdapter | None = None
) -> RequestPlan:
    """Plan the request, in a thread since rendering and tokenising long prompts takes time. Raises
    ServerError for what the model can't do."""
    check_task(prepared, "generate")
    check_text(prepared, request)
    check_media(prepared.spec, request, prepared.takes)
    if request.format:
        check(request.format, request.format_param)
    check_wanted()
    prompts = [render(prepared, prompt) for prompt in request.prompts]
    check_wanted()
    pairs = list(zip(request.prompts, prompts, strict=True))
    planned = [_rows(prepared, request, prompt, rendered) for prompt, rendered in pairs]
    for (those, _), rendered in zip(planned, prompts, strict=True):
        _set_branches(prepared, those, rendered)
    rows = [row for those, _ in planned for row in those]
    _check_prompt_logprobs(request, rows)
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
            most_padding=prepared.most_padding,
        ),
        ignored=tuple(dict.fromkeys(ignored)),
        unenforced=(*of_text, *of_tools),
        unchecked=bool(of_text),
        tool_output_tokens=sum(tool_output_tokens(prepared, each) for each in request.prompts),
    )


def _set_branches(prepared: PreparedModel, rows: list[Generate], rendered: RenderedPrompt) -> None:
    if prepared.kv.window or prepared.kv.fixed:  # other KV caches can be trimmed to any length
        found = rendered.branches()
        for row in rows:
            row.branches, row.shared = list(found.places), found.shared
            row.continued_from = found.continued_from


def with_continued_messages(prepared: PreparedModel, request: GenerateRequest) -> GenerateRequest:
    """Check the assistant messages that answers are to continue, and separate their reasoning from
    their text."""
    prompts = (_continued(prepared, request, prompt) for prompt in request.prompts)
    return replace(request, prompts=tuple(prompts))


def _continued(prepared: PreparedModel, request: GenerateRequest, prompt: Prompt) -> Prompt:
    if not isinstance(prompt, Conversation) or not prompt.continue_final_message:
        return prompt
    family, checkpoint = prepared.family, prepared.checkpoint
    prompt = with_open_reasoning(prompt, family.reasoning_pairs(checkpoint))
    check_continued(prompt, reasons=family.reasons(checkpoint))
    must_call = request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)
    if must_call and prompt.messages[-1].content:
        raise BadRequest(
            "`tool_choice` requires a tool call, but the last message, which the answer continues, "
            "is text already. Leave one of them out.",
            param="tool_choice",
        )
    return prompt


def shortened(
    planned: RequestPlan, prepared: PreparedModel, request: GenerateRequest, most: int
) -> RequestPlan:
    """The plan with limits for the answers so that they fit into memory, unless the client set a
    limit. If not even the prompts fit, the plan is unchanged and the pool refuses the request.

    most: the tokens of each row that memory has room for.
    """
    is_final = request.max_tokens is not None and not request.may_end_early
    if is_final or planned.demand.most_tokens <= most:
        return planned
    if most >= prepared.context_length:
        return planned  # the context limits a row before memory does
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


def count_prompt(prepared: PreparedModel, request: GenerateRequest) -> int:
    """The number of the prompts' tokens, even if they exceed the context. It must be called in a
    thread, as `plan`. Raises ContextTooLong for more text than `check_text` allows."""
    check_text(prepared, request)
    request, _ = without_volatile_lines(request)
    request = with_continued_messages(prepared, request)
    roomy = replace(prepared, spec=replace(prepared.spec, context_length=UNLIMITED))
    return sum(len(render(roomy, prompt).tokens) for prompt in request.prompts)


def retry_row(
    prepared: PreparedModel, request: GenerateRequest, conversation: Conversation, first: Generate
) -> Generate | None:
    """The row that generates a rejected answer again. None if the context or the reserved memory
    has no room for it, or if a replay model has no recording of a second answer."""
    prompt = tokenized(prepared, conversation)
    room = min(_longest(prepared, request, first), prepared.context_length) - len(prompt.tokens)
    if room <= 0:
        return None
    try:
        (row,), _ = _rows(prepared, replace(request, n=1), conversation, prompt)
    except NoRecording:
        return None
    row.max_tokens, row.overflow_tokens = first.max_tokens, first.overflow_tokens
    row.end_within(room)
    row.adapter, row.adapter_scale = first.adapter, first.adapter_scale
    return row


def _longest(prepared: PreparedModel, request: GenerateRequest, row: Generate) -> int:
    """An upper bound of the row's tokens, with a retry and an answer prefix."""
    once = len(row.prompt) + row.max_tokens
    if not any(isinstance(prompt, Conversation) for prompt in request.prompts):
        return once
    again = row.max_tokens + limits.CORRECTION_TOKENS if may_retry(prepared, request) else 0
    # an answer prefix has at most as many tokens as characters
    return once + again + len(prepared.family.answer_prefix)


def may_retry(prepared: PreparedModel, request: GenerateRequest) -> bool:
    """Whether an answer that breaks its format may be generated again."""
    if any(isinstance(each, Conversation) and each.continued for each in request.prompts):
        return False  # the begun message can't be taken back
    may_repeat = request.buffered and prepared.spec.repair.retries
    return bool(may_repeat and request.format and unenforced(request.format))


def _ignored(
    prepared: PreparedModel, request: GenerateRequest, prompt: Prompt, rendered: RenderedPrompt
) -> Iterator[str]:
    """The parameters set by the client that have no effect. Those of models.yaml are not
    reported."""
    if request.prediction and not _speculates(prepared, request):
        yield "prediction"
    if not isinstance(prompt, Conversation):
        yield from rendered.ignored
        return
    if has_extra_content(prompt):
        yield EXTRA_CONTENT
    yield from rendered.unseen
    own = prompt.template_kwargs
    budget = budget_of(prepared, request, prompt)
    # the engine enforces these even if the template does not read them
    enforced = {"thinking_budget"} if request.thinking_budget is not None else set()
    if budget == 0 and own.get("reasoning_effort") == "none":
        enforced.add("reasoning_effort")
    configured = prepared.spec.template_kwargs.keys() - own.keys()
    for name in sorted(configured):
        if f"chat_template_kwargs.{name}" in rendered.ignored:
            _warn_unread(prepared.id, name)
    silent = {f"chat_template_kwargs.{name}" for name in enforced | configured | request.implied}
    names = request.param_names
    yield from (names.get(name, name) for name in rendered.ignored if name not in silent)


@lru_cache(maxsize=256)
def _warn_unread(model: str, name: str) -> None:
    """Once for each model and name, since every request has them."""
    log.warning("%s: its template does not read `%s` of `template_kwargs`", model, name)


def _rows(
    prepared: PreparedModel, request: GenerateRequest, source: Prompt, prompt: RenderedPrompt
) -> tuple[list[Generate], tuple[str, ...]]:
    """The rows of one prompt, and the paths of the tools' schema keywords that their grammar does
    not enforce."""
    rows = [_row(prepared, request, source, prompt, choice) for choice in range(request.n)]
    if request.prediction and _speculates(prepared, request):
        most = max(row.max_tokens for row in rows)
        used = request.prediction[: most * prepared.checkpoint.tokenizer.longest]
        predicted = text_tokens(prepared.checkpoint, used)[:most]
        for row in rows:
            row.prediction = predicted
    return rows, constrain_rows(prepared, request, source, rows)


def _speculates(prepared: PreparedModel, request: GenerateRequest) -> bool:
    is_deterministic = request.deterministic or prepared.spec.deterministic
    return prepared.spec.speculation == "auto" and not is_deterministic


def _row(
    prepared: PreparedModel,
    request: GenerateRequest,
    source: Prompt,
    prompt: RenderedPrompt,
    choice: int,
) -> Generate:
    room = prepared.context_length - len(prompt.tokens)
    limit = min(_limit(prepared, request), room)
    overflow = min(_overflow_tokens(prepared, request), room - limit)
    stops = prepared.family.stops(prepared.checkpoint)
    if isinstance(source, Infill):
        stops |= infill_tokens(prepared).stops
    row = Generate(
        row=0,
        model=prepared.id,
        prompt=prompt.tokens,
        max_tokens=limit + overflow,
        overflow_tokens=overflow,
        stop_tokens=sorted(stops),
        sampling=sampling(prepared.spec, request, prepared.checkpoint.sampling, choice),
        prompt_logprobs=request.echo and (request.logprobs is not None or request.max_tokens == 0),
        client=request.client,
        tier=request.tier,
        cache_scope=request.cache_scope,
        on_disk=request.on_disk,
        loops=prepared.spec.repair.loops,
        deterministic=request.deterministic or prepared.spec.deterministic,
        pictures=list(prompt.pictures),
    )
    if prepared.transcript:
        recording = prepared.transcript.pick(source, (request.model, prepared.id))
        play_recording(prepared, row, recording)
    return row


def _check_prompt_logprobs(request: GenerateRequest, rows: Sequence[Generate]) -> None:
    """Raises BadRequest if the prompts have more log probabilities than a response may hold."""
    top = request.logprobs or 0
    count = sum((1 + top) * len(row.prompt) for row in rows if row.prompt_logprobs)
    if count > limits.KEPT_LOGPROBS:
        raise BadRequest(
            f"The prompts have {count:,} log probabilities, and a response holds "
            f"{limits.KEPT_LOGPROBS:,}. Ask for fewer alternatives or a shorter prompt.",
            param="echo",
        )


def _limit(prepared: PreparedModel, request: GenerateRequest) -> int:
    limit = token_limit(prepared.spec, request)
    return limits.ANSWER_TOKENS if limit is None else limit


def _overflow_tokens(prepared: PreparedModel, request: GenerateRequest) -> int:
    """The tokens in which JSON may be completed after the limit of models.yaml. A limit set by the
    client is final."""
    if request.max_tokens is not None or not isinstance(request.format, JsonFormat):
        return 0
    limit = _limit(prepared, request)
    return min(limit, max(0, limits.ANSWER_TOKENS - limit))


SHOWN_OUTPUT = 60
"""The number of characters of output that the error shows before the rejected token."""


def play_recording(prepared: PreparedModel, row: Generate, recording: Recording) -> None:
    """Make the row play a recorded answer, at the recording's pace."""
    tokenizer, entry = prepared.checkpoint.tokenizer, recording.entry
    row.prompt = row.prompt + tokenizer.encode(entry.generation_prompt)
    row.delay = entry.delay_ms / 1000
    output = entry.tokens(tokenizer, prepared.family)
    row.forced_tokens = [*output, row.stop_tokens[0]]
    row.recording = recording.name if entry.off_grammar == "error" else ""
    if entry.finish == "length":
        row.recording_is_cut = True
        row.end_within(len(output))


def departure_error(
    prepared: PreparedModel, request: GenerateRequest, row: Generate, left: RowLeftGrammar
) -> RecordingLeftGrammar:
    """The error for a recording that the request's grammar does not allow."""
    tokenizer = prepared.checkpoint.tokenizer
    before = tokenizer.raw(left.before)
    place = f"after {_quoted(before[-SHOWN_OUTPUT:])}" if before else "at its beginning"
    name = partial(_token_name, tokenizer, row)
    others = f" or {left.others} other tokens" if left.others else ""
    param = request.format_param if request.format else "tools"
    settings = "" if request.format else ", or set `constrain_calls: false` for this model"
    return RecordingLeftGrammar(
        f"The output of {row.recording} leaves the grammar of this request at token "
        f"{left.at + 1}, {place}: it has {name(left.token)}, where the grammar "
        f"takes {', '.join(map(name, left.allowed))}{others}. Correct the entry, or the request's "
        f"`{param}`{settings}.",
        param=param,
    )


def _token_name(tokenizer: Tokenizer, row: Generate, token: int) -> str:
    spelled = tokenizer.spelling(token)
    return f"the end of the answer ({spelled})" if token in row.stop_tokens else _quoted(spelled)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


ROUTES: Mapping[Task, str] = {
    "generate": "generates text: use /v1/chat/completions",
    "embed": "computes embeddings: use /v1/embeddings",
    "rerank": "ranks documents: use /v1/rerank",
}


async def prepared_for(task: Task, model: str, pool: Pool) -> PreparedModel:
    """The model for embeddings or ranks. Raises BadRequest if it has another task, or if its name
    includes an adapter, which these tasks can't use."""
    name, adapter = pool.models.split(model)
    prepared = await pool.prepared(name)
    log_model(prepared.id, prepared.family.name)
    check_task(prepared, task)
    if adapter:
        raise BadRequest(
            f"Embeddings and ranks are computed without adapters. Name the model alone: "
            f"{prepared.id}.",
            param="model",
        )
    return prepared


def check_task(prepared: PreparedModel, wanted: Task) -> None:
    """Raises BadRequest if the model has another task, for example for embeddings of a chat model.
    vLLM does so too."""
    if prepared.task != wanted:
        raise BadRequest(
            f"{prepared.id} {ROUTES[prepared.task]}. Its owner can change that: `task: {wanted}` "
            "in models.yaml.",
            param="model",
        )


COUNTED_CHARACTERS = 2 << 20
"""The characters above which a prompt is not tokenised for the error message alone, since that
takes twenty times the text's memory."""


class PromptOverflow(ContextTooLong):
    """A prompt is too long. Planning stops early and does not know its length, which takes time to
    count and is not needed where the request is shortened and tried again."""

    def __init__(
        self, error: ContextTooLong, prepared: PreparedModel, request: GenerateRequest
    ) -> None:
        super().__init__(error.message, param=error.param)
        self.request = request
        self._prepared = prepared

    @property
    def context(self) -> int:
        return self._prepared.context_length

    async def tokens(self) -> int:
        """The tokens of the longest prompt, or a lower bound if it is too long to be tokenised."""
        return await in_thread(self._longest, model=self._prepared.id)

    def _longest(self) -> int:
        prompts = self.request.prompts
        return max(self._count(replace(self.request, prompts=(prompt,))) for prompt in prompts)

    def _count(self, request: GenerateRequest) -> int:
        characters = characters_of(request)
        if characters <= COUNTED_CHARACTERS:
            with suppress(ContextTooLong):
                return count_prompt(self._prepared, request)
        return max(self.context, characters // self._prepared.checkpoint.tokenizer.longest)


MakeOverflowError = Callable[[PromptOverflow, int], ContextTooLong]
"""Makes the error as one API words it, from the overflow and the prompt's number of tokens."""
