"""Lets the idle engine compute the beginning of a conversation's next prompt."""

from dataclasses import dataclass, field

from mlx_server.engine.messages import ComputeAhead, Generate
from mlx_server.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.generation.rendering import chat_prompt
from mlx_server.messages import Conversation, Message, ToolCall
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import PreparedModel
from mlx_server.prompts.next_prompt import next_beginning
from mlx_server.requests import GenerateRequest


@dataclass
class AnswerMessage:
    """Accumulates the events of an answer into the message that the next prompt will have."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    is_whole: bool = False
    """Whether the answer has ended for any other reason than its limit."""
    _begun: dict[int, ToolCallStarted] = field(default_factory=dict)
    _arguments: dict[int, list[str]] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        match event:
            case TextDelta():
                self.texts.append(event.separated)
            case ReasoningDelta():
                self.reasoning.append(event.separated)
            case ToolCallStarted(call=call):
                self._begun[call], self._arguments[call] = event, []
            case ToolCallDelta(call=call):
                self._arguments[call].append(event.arguments)
            case ToolCallFinished(call=call):
                begun = self._begun[call]
                self.calls.append(ToolCall(begun.id, begun.name, "".join(self._arguments[call])))
            case Finished(reason=reason):
                self.is_whole = reason != "length"

    def message(self) -> Message:
        return Message(
            "assistant",
            "".join(self.texts),
            reasoning="".join(self.reasoning) or None,
            tool_calls=tuple(self.calls),
        )


def compute_ahead(
    pool: Pool,
    prepared: PreparedModel,
    request: GenerateRequest,
    row: Generate,
    answer: AnswerMessage,
) -> None:
    """Lets the engine compute the next prompt, if the request has one complete answer in a
    conversation and models.yaml sets `compute_ahead`.

    row: the request's first row, whose adapter and cache scope the next prompt will have.
    """
    is_one = len(request.prompts) == request.n == 1
    if not (is_one and answer.is_whole and prepared.spec.compute_ahead):
        return
    (conversation,) = request.prompts
    if isinstance(conversation, Conversation) and prepared.transcript is None:
        message = answer.message()
        pool.compute_ahead(prepared, lambda: _command(prepared, conversation, message, row))


def _command(
    prepared: PreparedModel, conversation: Conversation, answer: Message, row: Generate
) -> ComputeAhead:
    return ComputeAhead(
        row.model,
        next_beginning(conversation, answer, lambda each: chat_prompt(prepared, each).tokens),
        prepared.spec.compute_ahead,
        adapter=row.adapter,
        adapter_scale=row.adapter_scale,
        cache_scope=row.cache_scope,
        on_disk=row.on_disk,
    )
