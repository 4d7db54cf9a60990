"""The clients' gateway to other servers: it does with an answer what the server does with those of
its upstreams, by the same reader and the same review, and writes chat completions of the events.

What a server lacks is emulated: a thinking budget by two requests, tools by the prompt.
"""

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mlx_server.api.accumulator import warnings_body
from mlx_server.clients.exchange import Exchange, Wire, cut_off
from mlx_server.errors import BadRequest
from mlx_server.events import (
    Answer,
    Event,
    ReasoningDelta,
    Repaired,
    TextDelta,
    TokenCounts,
    ToolCallDelta,
    ToolCallStarted,
)
from mlx_server.families import AS_TEXT
from mlx_server.generation.review import Review
from mlx_server.messages import Conversation, Message
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.prompts.message_normalization import format_text
from mlx_server.reading import as_tool
from mlx_server.requests import (
    ALL_REPAIRS,
    GenerateRequest,
    JsonFormat,
    NamedTool,
    RepairPolicy,
    ToolChoice,
)
from mlx_server.upstream.dialects import REASONING
from mlx_server.upstream.pieces import read_piece
from mlx_server.upstream.reading import AnswerReader, ReadingOptions
from mlx_server.upstream.request import LimitedThoughts, with_system_prompt, with_tools_in_prompt
from mlx_server.upstream.text_families import ThoughtTags, opening_of_reasoning, text_family

T = TypeVar("T")


@dataclass(frozen=True)
class Gateway:
    family: str
    """The family by which answers are parsed."""
    repair: RepairPolicy = ALL_REPAIRS
    tools_in_prompt: bool = False
    """Whether the prompt describes the tools, so that the model writes calls as text."""
    think_tag: str = "think"
    thinking_tokens: int | None = None
    """The tokens after which the answer must begin, if its reasoning is limited by two requests:
    the server must be able to continue a message, as vLLM and llama.cpp are, and the model must
    write its reasoning within `think_tag`."""

    def ask(self, body: Wire) -> Exchange:
        """Requests an answer, repairs it and checks it against the request. An answer that is still
        wrong or is empty is requested again, up to `repair.retries` times. Of several choices only
        the first one is requested again."""
        sent = self.described(body)
        first = self._answer(body, 0, buffered=True)
        while not first.finished:
            again = [{"role": each.role, "content": each.content} for each in first.further]
            messages = [*sent["messages"], *again]
            raw = yield from self._attempt({**sent, "messages": messages}, first)
        answers = [first]
        for index, choice in enumerate(choices_of(raw)[1:], start=1):
            answers.append(self._answer(body, index, buffered=False))
            answers[-1].feed({**raw, "choices": [choice]})
            answers[-1].finish()
        collected = [each.collected for each in answers]
        choices = [
            {**choice, "message": _message(choice, answer), "finish_reason": answer.finish_reason}
            for choice, answer in zip(choices_of(raw), collected, strict=False)
        ]
        return {**raw, "choices": choices, **_warnings(raw, collected)}

    def described(self, body: Wire) -> Wire:
        """The body with the schema of its `response_format` in the system prompt too, since many
        servers accept the field and ignore it; and with its tools there, if they are to be."""
        if wanted := _format(body):
            described = {"schema": wanted.schema, "description": wanted.description}
            messages = with_system_prompt(body["messages"], format_text(described))
            body = {**body, "messages": messages}
        if not (self.tools_in_prompt and (tools := body.get("tools"))):
            return body
        rest = {n: v for n, v in body.items() if n not in ("tools", "tool_choice")}
        messages = with_tools_in_prompt(body["messages"], map(as_tool, tools), _tool_choice(body))
        return {**rest, "messages": messages}

    def stream(self, body: Wire) -> "GatewayStream":
        """The reader of the stream that answers `described(body)`."""
        return GatewayStream(partial(self._answer, body, buffered=False))

    def _answer(self, body: Wire, index: int, *, buffered: bool) -> "GatewayAnswer":
        """The answer to the request `body`, of which nothing is parsed yet.

        buffered: whether it is shown only once it is complete, and may be requested again.
        """
        family = text_family(self.family)
        choice = _tool_choice(body)
        tools = () if choice == "none" else tuple(map(as_tool, body.get("tools") or ()))
        options = ReadingOptions(
            family=family.with_tools_in_prompt() if self.tools_in_prompt else family,
            opening=opening_of_reasoning(self.family),
            context=ParseContext(index, tools, repair=self.repair, holds_calls=True),
            expects_calls_as_text=self.tools_in_prompt,
        )
        request = GenerateRequest(
            model="",
            prompts=(Conversation((), tools),),
            n=index + 1,  # the review takes the prompt of this answer's index
            format=_format(body),
            tool_choice=choice,
            buffered=buffered,
        )
        return GatewayAnswer(options, request)

    def _attempt(self, body: Wire, answer: "GatewayAnswer") -> Exchange:
        """One attempt at an answer, by two requests if its reasoning is limited."""
        if (budget := self.thinking_tokens) is None:
            raw = yield body
            answer.feed_first(raw)
            answer.finish()
            return raw
        if self.family in AS_TEXT:
            raise BadRequest(
                f"Models of the family {self.family} have no tags around their reasoning, so two "
                "requests can't limit it. Leave out `two_pass`, and set `reasoning_effort`."
            )
        stop = body.get("stop") or []
        body = {**body, "stop": [stop] if isinstance(stop, str) else stop}
        tags = ThoughtTags(f"<{self.think_tag}>", f"</{self.think_tag}>")
        limited = LimitedThoughts(body, tags, budget, "max_tokens")
        raw = yield dict(limited.first())
        answer.feed_first(raw)
        if not answer.has_text:
            second = answer.continued(limited)
            raw = yield second
            answer.feed_first(raw)
            raw = {**raw, "usage": _usage(answer.attempt.counts)}
        answer.finish()
        return raw


class GatewayAnswer:
    """One choice of another server's answer, across every attempt at it: parsed as far as it has
    arrived, and reviewed."""

    def __init__(self, options: ReadingOptions, request: GenerateRequest) -> None:
        self.collected = Answer()
        self.further: Sequence[Message] = ()
        """The messages that the next attempt adds to the conversation."""
        self._options = options
        self.attempt = AnswerReader(options)
        must_call = request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)
        self._review = Review(
            options.context.index,
            request,
            options.family,
            options.context.repair,
            self,
            unchecked=must_call or request.format is not None,
            holds_all=True,
            nudges=options.context.repair.retries if request.buffered else 0,
            blocks=True,
        )

    @property
    def finished(self) -> bool:
        return self._review.finished

    @property
    def has_text(self) -> bool:
        """Whether there is more than thoughts, and it was not cut off."""
        return self.attempt.needs_no_more or not self.attempt.is_without_answer

    def feed(self, value: Wire) -> list[Event]:
        """The events of a body or a chunk that has only this answer's choice."""
        parts = self.attempt.parts(read_piece(value))
        return self._reviewed(event for part in parts for event in self.attempt.feed(part))

    def feed_first(self, body: Wire) -> None:
        self.feed({**body, "choices": choices_of(body)[:1]})

    def continued(self, thinking: LimitedThoughts) -> Wire:
        """The body of the second request, which continues the answer to the first."""
        reader = self.attempt
        body = thinking.second(reader.thoughts, reader.content, thinking.budget)
        self._reviewed(reader.close_thoughts(thinking.tags))
        return dict(body)

    def finish(self) -> list[Event]:
        """The last events; none if there is to be another attempt."""
        return self._reviewed(self.attempt.finish())

    async def begin_again(self, conversation: Conversation) -> bool:
        self.further = conversation.messages
        self.attempt = AnswerReader(self._options)
        return True

    def _reviewed(self, events: Iterable[Event]) -> list[Event]:
        # the server's usage is passed on unchanged, so an estimate in place of it is not reported
        events = (e for e in events if not (isinstance(e, Repaired) and e.what == "usage"))
        reported = at_once(self._review.reviewed(events))
        for event in reported:
            self.collected.add(event)
        return reported


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing, with or without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits for something")


class GatewayStream:
    """Turns the chunks of another server's stream into chunks of its reviewed answers."""

    def __init__(self, answer: Callable[[int], GatewayAnswer]) -> None:
        """answer: makes the answer with an index."""
        self._answer = answer
        self._answers: dict[int, GatewayAnswer] = {}

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
        index = index if isinstance(index, int) and index > 0 else 0
        if index not in self._answers:
            self._answers[index] = self._answer(index)
        answer = self._answers[index]
        if answer.finished:
            return
        events = answer.feed({**chunk, "choices": [choice]})
        has_ended = answer.attempt.has_ended
        if has_ended:
            events += answer.finish()
        for delta in filter(None, map(_delta, events)):
            yield {**head, "choices": [{**choice, "delta": delta, "finish_reason": None}]}
        if has_ended:
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
    warnings = warnings_body(answers)
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


def _usage(counts: TokenCounts) -> Wire:
    """The usage of both requests together."""
    prompt, completion = counts.further_prompt_tokens, counts.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
    }


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
