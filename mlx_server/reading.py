"""Reads what a model wrote, by its family: reasoning, text and tool calls apart.

It is the parser of the server as a library, which needs neither MLX nor a server:

    events = mlx_server.read("<think>Paris?</think>It rains.", "qwen3")
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_server.errors import BadRequest
from mlx_server.events import Event, Finished, FinishReason, TokenCounts, ToolCallFinished
from mlx_server.families import AS_TEXT, family_named
from mlx_server.messages import Tool
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.parsers.parse_context import ParseContext, Parser
from mlx_server.requests import ALL_REPAIRS, RepairPolicy

NO_TOKEN = -1
"""Stands for the tokens of a text that came without them."""

ToolDescription = Tool | Mapping[str, Any]
"""A tool as the server's library has it, or as OpenAI's API describes it."""


def read(
    output: str | Sequence[int],
    family: str = "plain",
    tools: Sequence[ToolDescription] = (),
    *,
    prompt_end: str = "",
    cut: bool = False,
    tokenizer: Path | None = None,
    repair: RepairPolicy = ALL_REPAIRS,
) -> list[Event]:
    """The events of a complete answer, ending with `Finished`.

    `output` is what the model wrote, delimiters included, as text or as token ids; ids of other
    families than gpt_oss need the checkpoint's `tokenizer.json`. `tools` are those that the model
    was offered: a call of any other tool is text, or reported next to other calls. `prompt_end` is
    the end of the prompt, if it leaves the model within a section, such as "<think>". `cut` says
    that a limit ended the answer.
    """
    reader = OutputReader(family, tools, prompt_end=prompt_end, tokenizer=tokenizer, repair=repair)
    return [*reader.feed(output), *reader.finish(cut=cut)]


class OutputReader:
    """Reads an answer piece by piece. The events are the same however the answer is cut."""

    def __init__(
        self,
        family: str = "plain",
        tools: Sequence[ToolDescription] = (),
        *,
        index: int = 0,
        prompt_end: str = "",
        tokenizer: Path | None = None,
        repair: RepairPolicy = ALL_REPAIRS,
    ) -> None:
        self._family, self._index = family, index
        self._tokenizer = Tokenizer(tokenizer) if tokenizer else None
        self._detokenizer = self._tokenizer.detokenizer() if self._tokenizer else None
        self._context = ParseContext(
            index,
            tuple(map(as_tool, tools)),
            tuple(self._tokenizer.encode(prompt_end)) if self._tokenizer else (),
            prompt_end,
            self._tokenizer.control_tokens if self._tokenizer else {},
            repair,
            holds_calls=True,  # no grammar guarantees that a call will be complete
        )
        family_named(family)  # an unknown name is an error before the first text
        self._parser: Parser | None = None
        self._tokens = self._calls = 0

    def feed(self, piece: str | Sequence[int]) -> list[Event]:
        """The events that the next text, or the next token ids, complete."""
        if isinstance(piece, str):
            parser = self._parser_of(AS_TEXT.get(self._family, self._family))
            return self._counted(parser.feed(NO_TOKEN, piece) if piece else [])
        return self._counted([event for token in piece for event in self._fed(token)])

    def finish(self, *, cut: bool = False) -> list[Event]:
        """The last events, and `Finished`."""
        parser = self._parser_of(AS_TEXT.get(self._family, self._family))
        events = self._counted(parser.finish(cut=cut))
        reason: FinishReason = "length" if cut else "tool_calls" if self._calls else "stop"
        return [*events, Finished(self._index, reason, TokenCounts(self._tokens))]

    def _fed(self, token: int) -> list[Event]:
        if self._detokenizer is None and self._family not in AS_TEXT:
            raise BadRequest(
                f"Token ids of the family {self._family} can't be read without its checkpoint's "
                "tokenizer.json. Give its path as `tokenizer`, or give the text."
            )
        self._tokens += 1
        text = self._detokenizer.feed(token) if self._detokenizer else ""
        return self._parser_of(self._family).feed(token, text)

    def _parser_of(self, family: str) -> Parser:
        """The parser, which is made for what comes first: text or token ids."""
        if self._parser is None:
            self._parser = family_named(family).make_parser(self._context)
        return self._parser

    def _counted(self, events: list[Event]) -> list[Event]:
        self._calls += sum(isinstance(event, ToolCallFinished) for event in events)
        return events


def as_tool(described: ToolDescription) -> Tool:
    """The tool that OpenAI's API describes as `{"type": "function", "function": {...}}`."""
    if isinstance(described, Tool):
        return described
    function = described.get("function", described)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise BadRequest('A tool is {"type": "function", "function": {"name": ...}}.')
    parameters = function.get("parameters") or {}
    return Tool(name, function.get("description"), parameters, bool(function.get("strict")))
