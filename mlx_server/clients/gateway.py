"""The clients' gateway to other servers: answers are parsed as `upstream/` does, repaired, checked
and requested again, and written as chat completions. What a server lacks is emulated: a thinking
budget by two requests, and tools that are described in the prompt.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_server.api.accumulator import warnings_body
from mlx_server.clients.exchange import Exchange, Wire, cut_off, sent
from mlx_server.errors import BadRequest
from mlx_server.events import (
    Answer,
    Event,
    ReasoningDelta,
    Repaired,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    Violation,
)
from mlx_server.families import AS_TEXT
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.prompts.system_text import format_text
from mlx_server.reading import as_tool
from mlx_server.repair import ALL_REPAIRS, RepairPolicy
from mlx_server.repair.answers import (
    NO_ANSWER,
    CheckedAnswer,
    RawAnswer,
    Requirements,
    check_answer,
    retry_message,
)
from mlx_server.requests import JsonFormat, NamedTool, ToolChoice
from mlx_server.upstream.dialects import REASONING
from mlx_server.upstream.pieces import AnswerPiece, read_piece
from mlx_server.upstream.reading import AnswerReader, ReadingOptions
from mlx_server.upstream.request import with_system_prompt, with_tools_in_prompt
from mlx_server.upstream.text_families import ThoughtTags, opening_of_reasoning, text_family


def reading_options(
    body: Mapping[str, Any],
    family: str,
    repair: RepairPolicy = ALL_REPAIRS,
    *,
    tools_in_prompt: bool = False,
) -> ReadingOptions:
    """Options for parsing the answer to the request `body`.

    tools_in_prompt: whether the prompt describes the tools, so that the model writes calls as text.
    """
    read_as = text_family(family)
    tools = () if body.get("tool_choice") == "none" else body.get("tools") or ()
    return ReadingOptions(
        family=read_as.with_tools_in_prompt() if tools_in_prompt else read_as,
        opening=opening_of_reasoning(family),
        context=ParseContext(tools=tuple(map(as_tool, tools)), repair=repair, holds_calls=True),
        expects_calls_as_text=tools_in_prompt,
    )


class ForeignAnswer:
    """One choice of another server's answer, parsed as far as it has arrived."""

    def __init__(self, options: ReadingOptions, index: int) -> None:
        self.collected = Answer()
        self._index = index
        self._options = replace(options, context=replace(options.context, index=index))
        self._reader = AnswerReader(self._options)

    @property
    def has_ended(self) -> bool:
        """Whether the server has sent a finish reason."""
        return self._reader.has_ended

    @property
    def finished(self) -> bool:
        return self._reader.finished

    def feed(self, value: Wire) -> list[Event]:
        """Parses a body or a chunk that has only this answer's choice."""
        return self._collect(self._events_of(self._reader.parts(read_piece(value))))

    def finish(self) -> list[Event]:
        return self._collect(self._reader.finish())

    def checked(self, required: Requirements) -> CheckedAnswer:
        context, answer = self._options.context, self.collected
        raw = RawAnswer(
            answer.text,
            answer.thoughts,
            len(answer.calls),
            answer.finish_reason or "stop",
            call_delimiters=self._options.family.call_delimiters(context.tools),
            is_unterminated=self._reader.is_unterminated,
            attempted_call=answer.attempts_call,
        )
        checked = check_answer(raw, required, context.repair)
        if checked.errors or checked.text.strip() or raw.calls or raw.reason == "length":
            return checked
        return replace(checked, errors=(NO_ANSWER,))

    def accept(self, checked: CheckedAnswer) -> None:
        """Replaces the text by the repaired one, and reports the repairs and violations."""
        self.collected.texts = [checked.text]
        self._collect(self._reports(checked))

    def review(self, required: Requirements) -> list[Event]:
        """Checks a streamed answer, and returns its last events. Text that was sent can't be
        repaired; only if there was none, the answer may be taken from the reasoning."""
        checked = self.checked(required)
        if ("reasoning", "content") not in checked.repairs:
            return self._collect(self._reports(replace(checked, repairs=())))
        return self._collect([TextDelta(self._index, checked.text), *self._reports(checked)])

    def _events_of(self, parts: Iterable[AnswerPiece]) -> Iterator[Event]:
        return (event for part in parts for event in self._reader.feed(part))

    def _collect(self, events: Iterable[Event]) -> list[Event]:
        # the server's usage is passed on unchanged, so an estimate in place of it is not reported
        reported = [e for e in events if not (isinstance(e, Repaired) and e.what == "usage")]
        for event in reported:
            self.collected.add(event)
        return reported

    def _reports(self, checked: CheckedAnswer) -> Iterator[Event]:
        for what, where in checked.repairs:
            yield Repaired(self._index, what, where)
        for error in checked.errors:
            yield Violation(self._index, error)


def read_choices(body: Wire, options: ReadingOptions) -> list[ForeignAnswer]:
    answers: list[ForeignAnswer] = []
    for index, choice in enumerate(choices_of(body)):
        answers.append(ForeignAnswer(options, index))
        answers[-1].feed({**body, "choices": [choice]})
        answers[-1].finish()
    return answers


def completion_of(body: Wire, answers: Sequence[ForeignAnswer]) -> Wire:
    """The body of a chat completion, with the parsed answers in place of its choices."""
    collected = [each.collected for each in answers]
    choices = [
        {**choice, "message": _message(choice, answer), "finish_reason": answer.finish_reason}
        for choice, answer in zip(choices_of(body), collected, strict=False)
    ]
    return {**body, "choices": choices, **_warnings(body, collected)}


def read_completion(body: Wire, options: ReadingOptions) -> Wire:
    return completion_of(body, read_choices(body, options))


class ForeignStreamReader:
    """Turns the chunks of another server's stream into chunks of its parsed answers."""

    def __init__(self, options: ReadingOptions, required: Requirements | None = None) -> None:
        """required: what the answers are checked for at their end; None if they are not checked."""
        self._options, self._required = options, required
        self._answers: dict[int, ForeignAnswer] = {}

    def feed(self, chunk: Wire) -> list[Wire]:
        choices = choices_of(chunk)
        head = {name: value for name, value in chunk.items() if name != "usage"}
        chunks = [each for choice in choices for each in self._choice(chunk, head, choice)]
        # several chunks may be made of one, but the usage must be counted once
        return [*chunks, {**chunk, "choices": []}] if chunk.get("usage") or not choices else chunks

    def end(self) -> None:
        """Raises GenerationFailed if the stream ended before an answer did."""
        if not self._answers or not all(each.finished for each in self._answers.values()):
            raise cut_off()

    def _choice(self, chunk: Wire, head: Wire, choice: Wire) -> Iterator[Wire]:
        index = choice.get("index")
        index = index if isinstance(index, int) else 0
        answer = self._answers.setdefault(index, ForeignAnswer(self._options, index))
        if answer.finished:
            return
        events = answer.feed({**chunk, "choices": [choice]})
        if answer.has_ended:
            events += answer.finish()
            events += answer.review(self._required) if self._required else ()
        for delta in filter(None, map(_delta, events)):
            yield {**head, "choices": [{**choice, "delta": delta, "finish_reason": None}]}
        if answer.has_ended:
            reason = answer.collected.finish_reason
            last = {**choice, "delta": {}, "finish_reason": reason}
            yield {**head, "choices": [last], **_warnings(chunk, [answer.collected])}


def _message(choice: Wire, answer: Answer) -> Wire:
    said = choice.get("message") or {}
    replaced = (*REASONING, "tool_calls", "function_call")
    others = {name: value for name, value in said.items() if name not in replaced}
    text = answer.text
    message: Wire = {
        "role": "assistant",
        **others,
        "content": text or (None if answer.calls else ""),
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.thoughts
    if answer.calls:
        message["tool_calls"] = [_call(each.id, each.name, each.arguments) for each in answer.calls]
    return message


def _delta(event: Event) -> Wire:
    match event:
        case TextDelta():
            return {"content": event.separated}
        case ReasoningDelta():
            return {"reasoning_content": event.separated}
        case ToolCallStarted(_, call, id, name):
            return {"tool_calls": [{"index": call, **_call(id, name, "")}]}
        case ToolCallDelta(_, call, arguments):
            return {"tool_calls": [{"index": call, "function": {"arguments": arguments}}]}
    return {}


def _call(id: str, name: str, arguments: str) -> Wire:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _warnings(body: Wire, answers: Sequence[Answer]) -> Wire:
    """The body's `mlx_server` member: the repairs and violations found here, after those that the
    server reported if it is an mlx-server itself."""
    repairs = [repair for each in answers for repair in each.repairs]
    violations = [violation for each in answers for violation in each.violations]
    warnings = warnings_body(repairs, (), violations)
    reported = body.get("mlx_server")
    if not (warnings and isinstance(reported, Mapping)):
        return warnings
    lists = {
        name: [*(reported.get(name) or ()), *each] for name, each in warnings["mlx_server"].items()
    }
    return {"mlx_server": {**reported, **lists}}


def choices_of(body: Wire) -> list[Wire]:
    """The body's choices that are objects; empty if `choices` is missing, null or not a list."""
    choices = body.get("choices")
    listed = choices if isinstance(choices, list) else []
    return [each for each in listed if isinstance(each, dict)]


Ask = Callable[[Wire], Exchange]


def checked_answer(
    body: Wire,
    family: str,
    repair: RepairPolicy = ALL_REPAIRS,
    ask: Ask = sent,
    *,
    tools_in_prompt: bool = False,
) -> Exchange:
    """Requests an answer, repairs it and checks it against the request. An answer that is still
    wrong is requested again with its errors in the conversation, up to `repair.retries` times.

    ask: makes one attempt, which may take several requests.
    """
    options = reading_options(body, family, repair, tools_in_prompt=tools_in_prompt)
    required = requirements(body)
    body = described_in_prompt(body, tools=tools_in_prompt)
    messages, attempts = body["messages"], 0
    while True:
        raw = yield from ask({**body, "messages": messages})
        answers = read_choices(raw, options) or [ForeignAnswer(options, 0)]
        checked = answers[0].checked(required)
        if not checked.errors or attempts >= repair.retries:
            answers[0].accept(checked)
            return completion_of(raw, answers)
        attempts += 1
        rejected = [{"role": "assistant", "content": checked.text}] if checked.text else []
        again = {"role": "user", "content": retry_message(checked.errors).content}
        messages = [*body["messages"], *rejected, again]


def two_passes(body: Wire, tag: str, thinking_tokens: int, family: str) -> Exchange:
    """Limits reasoning to `thinking_tokens` by two requests: the first stops at that limit or at
    the closing tag, the second continues the message with the answer, which may be a tool call.

    The server must be able to continue a message, as vLLM and llama.cpp are, and the model must
    write its reasoning within `<tag>`. The first answer is returned if it is already complete.
    """
    if family in AS_TEXT:
        raise BadRequest(
            f"Models of the family {family} have no tags around their reasoning, so two requests "
            "can't limit it. Leave out `two_pass`, and set `reasoning_effort`."
        )
    tags = ThoughtTags(f"<{tag}>", f"</{tag}>")
    stops = [*_stops(body), tags.closing]
    first = yield {**body, "max_tokens": thinking_tokens, "stop": stops}
    said = read_piece(first)
    has_answer = bool(said.calls) or bool(said.text.strip() and not tags.is_open(said.text))
    if has_answer and said.finish != "length" and said.stop != tags.closing:
        return first
    thoughts = (said.reasoning or said.text).strip().removeprefix(tags.opening).strip()
    begun = {"role": "assistant", "content": tags.begun(thoughts, "")}
    answer = yield {
        **body,
        "messages": [*body["messages"], begun],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    spent = said.usage.completion if said.usage else None
    return _joined(answer, thoughts, spent or 0)


def requirements(body: Wire) -> Requirements:
    """What the request's `response_format` and `tool_choice` require of its answer."""
    return Requirements(_format(body), _tool_choice(body))


def described_in_prompt(body: Wire, *, tools: bool) -> Wire:
    """The body with the schema of its `response_format` in the system prompt too, since many
    servers accept the field and ignore it.

    tools: whether its tools move to the system prompt as well, for servers without tool calling.
    """
    if wanted := _format(body):
        described = {"schema": wanted.schema, "description": wanted.description}
        messages = with_system_prompt(body["messages"], format_text(described))
        body = {**body, "messages": messages}
    return with_hermes_tools(body) if tools else body


def with_hermes_tools(body: Wire) -> Wire:
    """The body for a server without tool calling."""
    if not (tools := body.get("tools")):
        return body
    rest = {n: v for n, v in body.items() if n not in ("tools", "tool_choice")}
    described = map(as_tool, tools)
    messages = with_tools_in_prompt(body["messages"], described, _tool_choice(body))
    return {**rest, "messages": messages}


def _joined(answer: Wire, thoughts: str, spent: int) -> Wire:
    """The second request's answer with the first one's reasoning.

    spent: the completion tokens of the first request, which are added to the usage.
    """
    choice = next(iter(choices_of(answer)), {})
    message = {**(choice.get("message") or {}), "reasoning_content": thoughts}
    usage = dict(answer.get("usage") or {})
    for name in ("completion_tokens", "total_tokens"):
        usage[name] = (usage.get(name) or 0) + spent
    details = usage.get("completion_tokens_details") or {}
    usage["completion_tokens_details"] = {**details, "reasoning_tokens": spent}
    return {**answer, "choices": [{**choice, "message": message}], "usage": usage}


def _stops(body: Wire) -> list[str]:
    stop = body.get("stop")
    return [stop] if isinstance(stop, str) else list(stop or ())


def _format(body: Wire) -> JsonFormat | None:
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_object":
        return JsonFormat()
    described = wanted.get("json_schema") if wanted.get("type") == "json_schema" else None
    if not isinstance(described, Mapping):
        return None
    schema = described.get("schema", {"type": "object"})
    return JsonFormat(schema, description=described.get("description"))


def _tool_choice(body: Wire) -> ToolChoice:
    choice = body.get("tool_choice") or "auto"
    if isinstance(choice, Mapping):
        function = choice.get("function") or choice
        return NamedTool(str(function.get("name")))
    named: dict[str, ToolChoice] = {"none": "none", "required": "required"}
    return named.get(str(choice), "auto")
