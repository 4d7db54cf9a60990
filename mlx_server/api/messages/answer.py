"""Folds events into a message, or the events of its stream."""

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mlx_server.api.accumulator import Accumulator, Wire, arguments_object
from mlx_server.events import (
    Event,
    Finished,
    FinishReason,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from mlx_server.http.security import Signer
from mlx_server.http.sse import StreamedOutput
from mlx_server.messages import EXTRA_CONTENT, Phase

STOP_REASONS: Mapping[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
PING: Wire = {"type": "ping"}
CALL_ID = re.compile(r"[A-Za-z0-9_-]+")
"""Ids as Anthropic's clients and servers accept them."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    is_empty: bool = False
    """Whether nothing is answered: the request only fills the prompt cache."""
    omits_thoughts: bool = False
    """Whether a thought comes only in its signature."""
    stores_prompt: bool = False
    """Whether the request asked to keep its prompt in the prompt cache, and that keeps prompts."""
    shortest_stored: int = 0
    """Prompts with fewer tokens are not kept."""


class MessagesOutput(StreamedOutput):
    def __init__(self, *, model: str, signer: Signer, options: OutputOptions) -> None:
        self._accumulator = Accumulator(model=model, prompts=1, n=1)
        self._signer = signer
        self._options = options
        self._begun = False
        self._blocks = 0
        """The number of blocks that have begun; the last one is open if `_open` is set."""
        self._open: str | None = None
        self._phase: Phase | None = None
        self._thought: list[str] = []
        self._message: Wire = {}
        """The body so far, if the message is not streamed."""
        self._cut: set[int] = set()
        """Blocks of calls that were begun and not finished."""

    def add(self, event: Event) -> None:
        """Puts the chunks of the stream together, as a client does it."""
        for chunk in self.chunks(event):
            _fold(self._message, chunk)

    def body(self) -> Wire:
        content = enumerate(self._message["content"])
        blocks = [block for i, block in content if i not in self._cut]
        return {**self._message, "content": blocks}

    def chunks(self, event: Event) -> Iterator[Wire]:
        self._accumulator.add(event)
        match event:
            case PromptProgress(_, _, cached):
                yield from self._begin(cached)
                yield PING
            case Finished():
                yield from self._begin(event.counts.cached_tokens)
                yield from self._close()
                yield from self._end(event)
            case _ if self._options.is_empty:
                return
            case ReasoningDelta():
                text = self._joined(event, "thinking")
                yield from self._continue("thinking")
                self._thought.append(text)
                if not self._options.omits_thoughts:
                    yield self._delta({"type": "thinking_delta", "thinking": text})
            case TextDelta(phase=phase) if event.text:
                if phase and self._phase and phase != self._phase:
                    yield from self._close()
                self._phase = phase or self._phase
                text = self._joined(event, "text")
                yield from self._continue("text")
                yield self._delta({"type": "text_delta", "text": text})
            case ToolCallStarted(_, _, id, name, extra):
                unique = id if CALL_ID.fullmatch(id) else f"toolu_{uuid.uuid4().hex}"
                call: Wire = {"type": "tool_use", "id": unique, "name": name, "input": {}}
                call |= {EXTRA_CONTENT: extra} if extra else {}
                yield from self._begin()
                yield from self._close()
                yield self._start(call)
                self._cut.add(self._blocks - 1)
            case ToolCallDelta(_, _, arguments):
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            case ToolCallFinished():
                self._cut.discard(self._blocks - 1)
                yield from self._close()

    def _begin(self, cached: int = 0) -> Iterator[Wire]:
        """The first event, which waits until it is known what was in the prompt cache."""
        if self._begun:
            return
        self._begun = True
        usage = {**self._input_usage(cached), "output_tokens": 0}
        message: Wire = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self._accumulator.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        yield {"type": "message_start", "message": message}

    def _continue(self, kind: str) -> Iterator[Wire]:
        """Opens a block of this kind, unless it is open."""
        if self._open == kind:
            return
        yield from self._begin()
        yield from self._close()
        empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
        yield self._start({"type": kind, **empty})

    def _joined(self, event: TextDelta | ReasoningDelta, kind: str) -> str:
        """The event's text, with what separates it from an earlier one in the same block."""
        return event.separated if self._open == kind else event.text

    def _start(self, block: Wire) -> Wire:
        self._open = block["type"]
        self._blocks += 1
        return self._of_block("content_block_start", content_block=block)

    def _delta(self, delta: Wire) -> Wire:
        return self._of_block("content_block_delta", delta=delta)

    def _close(self) -> Iterator[Wire]:
        if self._open is None:
            return
        if self._open == "thinking":
            thought, self._thought = "".join(self._thought), []
            omits = self._options.omits_thoughts
            signature = self._signer.seal(thought) if omits else self._signer.sign(thought)
            yield self._delta({"type": "signature_delta", "signature": signature})
        self._open = None
        yield self._of_block("content_block_stop")

    def _of_block(self, kind: str, **more: Wire) -> Wire:
        return {"type": kind, "index": self._blocks - 1, **more}

    def _end(self, finished: Finished) -> Iterator[Wire]:
        (answer,) = self._accumulator.answers
        reason, tokens = STOP_REASONS[finished.reason], finished.counts.completion_tokens
        if finished.stop_string is not None:
            reason = "stop_sequence"
        if self._options.is_empty:
            reason, tokens = "max_tokens", 0
        usage = {
            **self._input_usage(finished.counts.cached_tokens),
            "output_tokens": tokens,
            "output_tokens_details": {"thinking_tokens": finished.counts.reasoning_tokens},
        }
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": finished.stop_string},
            "usage": usage,
            **self._accumulator.warnings(answer),
        }
        yield {"type": "message_stop"}

    def _input_usage(self, cached: int) -> Wire:
        """The prompt's tokens: those from the prompt cache, those new in it, and the others."""
        accumulator = self._accumulator
        prompt = accumulator.prompt_tokens or accumulator.estimated_prompt_tokens
        # the last token of a prompt is computed with the answer's first one
        is_stored = self._options.stores_prompt and prompt > self._options.shortest_stored
        stored = max(0, prompt - 1 - cached) if is_stored else 0
        return {
            "input_tokens": prompt - cached - stored,
            "cache_creation_input_tokens": stored,
            "cache_read_input_tokens": cached,
            **self._tier(),
        }

    def _tier(self) -> Wire:
        """Anthropic's name of a tier that is not the usual one, or that was asked for."""
        tier = self._accumulator.service_tier
        named = {"priority": "priority", "batch": "batch"}.get(tier or "", "standard")
        return {"service_tier": named} if tier else {}


def _fold(message: Wire, chunk: Wire) -> None:
    match chunk["type"]:
        case "message_start":
            message |= chunk["message"]
        case "content_block_start":
            message["content"].append(chunk["content_block"] | {})
        case "content_block_delta":
            block = message["content"][-1]
            for name, text in chunk["delta"].items():
                if name != "type":
                    block[name] = block.get(name, "") + text
        case "content_block_stop" if message["content"][-1]["type"] == "tool_use":
            block = message["content"][-1]
            block["input"] = arguments_object(block.pop("partial_json", ""))
        case "message_delta":
            usage = message["usage"] | chunk["usage"]
            message |= {**chunk["delta"], "usage": usage}
            message |= {name: chunk[name] for name in chunk.keys() & {"mlx_server"}}
