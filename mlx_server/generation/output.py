"""Turns the engine's output for one row into events."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from mlx_server.engine.client import Item
from mlx_server.engine.messages import (
    Generate,
    Logprobs,
    Prefilled,
    PrefillProgress,
    PromptLogprobs,
    RowLeftGrammar,
    Thinking,
    Token,
)
from mlx_server.events import (
    BuiltInCall,
    Event,
    Finished,
    FinishReason,
    PromptProgress,
    ReasoningDelta,
    Repaired,
    TextDelta,
    TokenCounts,
    TokenLogprob,
    Violation,
)
from mlx_server.generation.constraints import parse_context
from mlx_server.generation.plan import departure_error
from mlx_server.grammars.formats import is_verbatim
from mlx_server.messages import Conversation
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.parsers.parse_context import ParseContext, Parser, Section, TextParser
from mlx_server.parsers.text_pieces import OutputProcessor
from mlx_server.pool.prepare import PreparedModel
from mlx_server.requests import GenerateRequest, NamedTool

LONGEST_DELIMITER = 32
"""The most tokens of a delimiter that closes reasoning."""


class RowOutput(OutputProcessor):
    """Turns the tokens of one attempt at an answer into events. A second row may continue the
    first one: see `next_row`."""

    def __init__(
        self, prepared: PreparedModel, index: int, row: Generate, request: GenerateRequest
    ) -> None:
        parallel = request.parallel_calls and not isinstance(request.tool_choice, NamedTool)
        super().__init__(index, request.stop, parallel=parallel)
        self._prepared = prepared
        self._row = row
        self._request = request
        self._next: Generate | None = None
        self._echo = request.echo
        self._limit = row.max_tokens - row.overflow_tokens
        """The tokens after which the answer ends, unless it may end its text in overflow tokens."""
        self._answer_tokens_left = request.max_response_tokens
        """The tokens left for the answer after its reasoning; None if they are not limited."""
        self._tokenizer = prepared.checkpoint.tokenizer
        self._detokenizer = self._tokenizer.detokenizer(special=request.special_tokens)
        self._parser = _parser(prepared, index, row, request)
        self._ids: list[int] = []
        self._tokens = self._reasoning = self._text = 0
        self._drafted = self._accepted = 0
        self._raw_ids: list[int] = []
        """All tokens that the model has generated, stop tokens included."""
        self._cached: int | None = None
        self._progress = request.progress
        self._has_output = self._has_text = self._is_forced = False
        self._prompt_logprobs: list[TokenLogprob] = []
        _, self._closes = prepared.family.thinking_delimiters()

    def begin(self) -> Iterator[Event]:
        if self._echo and not self._row.prompt_logprobs:
            yield TextDelta(self._index, self._prompt_text())

    def feed(self, item: Item) -> Iterator[Event]:
        if self.finished:
            return
        match item:
            case Token():
                yield from self._token(item)
            case Prefilled(_, cached) if self._cached is None:
                self._cached, prompt = cached, len(self._row.prompt)
                if self._progress and cached == prompt - 1:  # such a prompt needs no prefill
                    yield PromptProgress(self._index, prompt, cached, cached)
            case PrefillProgress(_, computed) if self._progress:
                prompt = len(self._row.prompt)
                yield PromptProgress(self._index, prompt, self._cached or 0, computed)
            case PromptLogprobs(_, logprobs):
                yield from self._scored(logprobs)
            case RowLeftGrammar():
                raise departure_error(self._prepared, self._request, self._row, item)

    def _scored(self, logprobs: list[Logprobs]) -> Iterator[Event]:
        scored = self._prompt_logprobs
        at, logprobs = len(scored), logprobs if scored else [Logprobs(None, []), *logprobs]
        tokens = zip(self._row.prompt[at : at + len(logprobs)], logprobs, strict=True)
        scored += [_token_logprob(self._tokenizer, *token) for token in tokens]
        if len(scored) < len(self._row.prompt):
            return
        yield TextDelta(self._index, self._prompt_text(), tuple(scored))
        if not self._row.max_tokens:
            yield self._finished("length")

    def _prompt_text(self) -> str:
        return self._tokenizer.decode(self._row.prompt)

    def _token(self, token: Token) -> Iterator[Event]:
        self._tokens += 1
        if token.drafts:
            self._drafted += token.drafts[0]
            self._accepted += token.drafts[1]
        self._raw_ids.append(token.id)
        if token.looped:
            place = "reasoning_content" if self._parser.section == "reasoning" else "content"
            what = f"{place}: it repeated the same {token.looped} tokens, so it was ended"
            yield Violation(self._index, what)
        if token.finish == "stop":  # the stop token itself is not part of the answer
            yield from self._force_answer() if self._is_only_reasoning() else self._finish("stop")
            return
        self._ids.append(token.id)
        section = self._parser.section
        if token.logprobs and section != "reasoning":  # a call's beginning may turn out to be text
            self._logprobs.append(_token_logprob(self._tokenizer, token.id, token.logprobs))
        events = self._parser.feed(token.id, self._detokenizer.feed(token.id))
        yield from self._forward(events)
        self._reasoning += self._is_reasoning(section, events)
        self._text += self._has_text and section == self._parser.section == "text"
        if section == "reasoning" != self._parser.section:
            self._reasoning -= self._delimiter_tokens()
        self._count_answer_token(section)
        if self.is_complete:
            yield self._finished("stop")
        elif token.finish or self._answer_tokens_left == 0 or self._is_cut():
            yield from self._finish(token.finish or "length")

    def _is_reasoning(self, section: Section, events: Sequence[Event]) -> bool:
        """Whether the last token counts as reasoning. A delimiter does not, but one that is
        recognised only by the text after it is counted first: see `_delimiter_tokens`."""
        if self._parser.section != "reasoning":
            return False
        return section == "reasoning" or any(isinstance(e, ReasoningDelta) for e in events)

    def _delimiter_tokens(self) -> int:
        """The number of tokens counted as reasoning that turned out to be the beginning of the
        closing delimiter."""
        text = ""
        for before, token in enumerate(self._ids[: -LONGEST_DELIMITER - 1 : -1]):
            text = self._tokenizer.spelling(token) + text
            if any(delimiter in text for delimiter in self._closes):
                return before - (text not in self._closes)
        return 0

    def _count_answer_token(self, section: Section) -> None:
        """Counts the last token towards the answer's limit. Tokens before the first output are not
        counted, since they may be delimiters and white space.

        section: the parser's section before the token.
        """
        if self._answer_tokens_left is not None and self._has_output and section != "reasoning":
            self._answer_tokens_left -= 1

    def _is_cut(self) -> bool:
        """Whether the limit ends the answer. Only text may continue into the overflow tokens."""
        return self._tokens >= self._limit and not (
            self._has_output and self._parser.section == "text"
        )

    @property
    def reasoning_ran_out(self) -> bool:
        """Whether the reasoning used its whole budget and was cut off."""
        thinking = self._row.thinking
        budget = thinking.budget if thinking else None
        return budget is not None and self._reasoning >= budget

    @property
    def is_unterminated(self) -> bool:
        """Whether the answer ended within its reasoning."""
        return self._parser.is_unterminated

    def next_row(self) -> Generate | None:
        """Takes the row that is to continue this answer, if there is one. Its grammar is still that
        of the whole answer."""
        row, self._next = self._next, None
        return row

    def _is_only_reasoning(self) -> bool:
        """Whether the model stopped right after its reasoning, and an answer prefix can make it
        continue."""
        return (
            self._parser.awaits_answer
            and bool(self._prepared.family.answer_prefix)
            and self._prepared.spec.repair.mistakes
            and not (self._has_output or self._is_forced)
            and self._tokens_left_after(self._answer_prefix()) > 0
        )

    def _answer_prefix(self) -> list[int]:
        return self._tokenizer.encode(self._prepared.family.answer_prefix)

    def _tokens_left_after(self, prefix: list[int]) -> int:
        """The tokens that may follow the answer prefix, which takes context but is not counted
        towards `max_tokens`."""
        context = len(self._row.prompt) + len(self._ids) + len(prefix)
        return min(self._row.max_tokens - self._tokens, self._prepared.context_length - context)

    def _force_answer(self) -> Iterator[Event]:
        self._is_forced = True
        prefix = self._answer_prefix()
        for token in prefix:
            yield from self._forward(self._parser.feed(token, self._detokenizer.feed(token)))
        played, row = len(self._ids), self._row
        self._next = msgspec.structs.replace(
            row,
            prompt=[*row.prompt, *self._ids, *prefix],
            max_tokens=self._tokens_left_after(prefix),
            forced_tokens=row.forced_tokens
            and (row.forced_tokens[played + 1 :] or row.forced_tokens[-1:]),
            prompt_logprobs=False,
            thinking=self._thinking_left(),
        )

    def _thinking_left(self) -> Thinking | None:
        """The rest of the reasoning budget, for a continuation that may reason again."""
        if (thinking := self._row.thinking) is None:
            return None
        left = None if thinking.budget is None else max(0, thinking.budget - self._reasoning)
        return msgspec.structs.replace(thinking, inside=False, budget=left)

    def _finish(self, reason: FinishReason) -> Iterator[Event]:
        section = self._parser.section
        yield from self._forward(self._parser.finish(cut=reason == "length"))
        # the last tokens may have log probabilities but no text, for example an incomplete emoji
        control = self._tokenizer.control_tokens
        rest = [logprob for logprob in self._logprobs if logprob.id not in control]
        if section == "text" and rest and not any(map(_text_of, rest)):
            yield from self._stops.feed(TextDelta(self._index, "", tuple(self._logprobs)))
        yield from self._stops.finish()
        is_spent = self._row.grammar is not None and self._tokens >= self._limit
        if reason == "stop" and is_spent and not self._has_output:
            # a grammar that forbids an end within reasoning uses the last tokens to leave it
            reason = "length"
        if reason == "stop" and not self._calls and len(self._ids) > self._limit:
            yield Repaired(self._index, "cut", "content")
        yield self._finished("stop" if self._stops.matched else reason)

    def _forward(self, events: Sequence[Event]) -> Iterator[Event]:
        self._announce(events, self._parser)
        for event in events:
            if self.is_complete:
                return
            if not isinstance(event, Repaired | Violation | ReasoningDelta | BuiltInCall):
                self._has_output = True
            self._has_text = self._has_text or isinstance(event, TextDelta)
            yield from self._report(event)

    @property
    def counts(self) -> TokenCounts:
        return TokenCounts(
            completion_tokens=self._tokens,
            cached_tokens=self._cached or 0,
            reasoning_tokens=self._reasoning,
            text_tokens=self._text,
            accepted_draft_tokens=self._accepted,
            rejected_draft_tokens=self._drafted - self._accepted,
        )

    def _finished(self, reason: FinishReason) -> Finished:
        return replace(
            self._end(reason, self.counts),
            answer_forced=self._is_forced,
            raw=(self._tokenizer.raw(self._raw_ids),) if self._request.include_raw else (),
        )


def _parser(prepared: PreparedModel, index: int, row: Generate, request: GenerateRequest) -> Parser:
    prompt = request.prompts[index // request.n]
    if not isinstance(prompt, Conversation):  # a text completion has no reasoning or calls
        return TextParser(ParseContext(index))
    context = parse_context(prepared, prompt, row.prompt, index)
    if row.grammar is None:
        context = replace(context, holds_calls=True)
    if request.tool_choice == "none":  # then a call in the output is text
        context = replace(context, tools=())
    if request.format and row.grammar:
        verbatim = is_verbatim(request.format)
        context = replace(context, formatted=True, verbatim=verbatim)
    return prepared.family.make_parser(context)


def _text_of(logprob: TokenLogprob) -> str:
    """The token's characters; none for a part of a character."""
    return logprob.bytes.decode(errors="ignore")


def _token_logprob(tokenizer: Tokenizer, token: int, found: Logprobs) -> TokenLogprob:
    def entry(token: int, logprob: float | None) -> TokenLogprob:
        text, spelled = tokenizer.spelling(token), tokenizer.bytes_of(token)
        return TokenLogprob(text, spelled, logprob, id=token)

    return replace(entry(token, found.chosen), top=tuple(entry(*top) for top in found.top))
