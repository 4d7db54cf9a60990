"""Distinguishes delimiters that structure an answer from those that its text mentions."""

import re

from mlx_server.parsers.markup.delimiters import QUOTES, MarkupDelimiters
from mlx_server.parsers.markup.output import MarkupOutput
from mlx_server.tool_parsers.source import Source, Steps

BLANKS = re.compile(r"[ \t]+")
ENDS_SENTENCE = re.compile(r"[\w.!?:。！？]")
"""The last character of a thought that a closing tag may end within a line."""


class Mentions:
    def __init__(self, source: Source, delimiters: MarkupDelimiters, output: MarkupOutput) -> None:
        self._source = source
        self._delimiters = delimiters
        self._output = output

    def is_mentioned(self, delimiter: str, unclosed: str) -> Steps[bool]:
        """Whether a delimiter that closes nothing is part of a text about delimiters. It then
        stands in quotes or within a line, while one that ends a thought ends a line.

        unclosed: the closing delimiter of a thought that another delimiter has ended.
        """
        output, delimiters = self._output, self._delimiters
        if output.line_begun and delimiter in delimiters.closing_tags:
            return delimiter != unclosed and not (yield from self._ends_thought())
        if output.in_code and delimiter not in delimiters.closing_tags:
            return True
        if output.texts.last in QUOTES and not output.whitespace.holds:
            return bool((yield from self._source.comes(*QUOTES)))
        if not output.line_begun or delimiter in delimiters.tokens.values():
            return False
        ahead = self._source.lookahead()
        yield from ahead.run(BLANKS)
        begun = yield from self._source.after_space(*delimiters.all)
        return not begun and (yield from ahead.peek()) not in ("", "\n")

    def _ends_thought(self) -> Steps[bool]:
        """Whether a closing tag within a line follows a sentence, and a call or an empty line
        follows the tag: then the model has written a thought without an opening tag."""
        output = self._output
        if output.whitespace.holds or not ENDS_SENTENCE.fullmatch(output.texts.last):
            return False
        if (yield from self._source.comes(*self._delimiters.first_formats)):
            return True
        return (yield from self._source.comes("\n\n"))

    def is_example(self, delimiter: str) -> Steps[bool]:
        """Whether the call that a delimiter opens is shown in a block of code: one that is not all
        of the block, or after which the answer goes on."""
        call_format = self._delimiters.formats.get(delimiter)
        if not (call_format and call_format.closes and self._output.in_code):
            return False
        ahead = self._source.lookahead()
        while (yield from ahead.up_to(*call_format.closes)):
            yield from ahead.space()
            if not (yield from ahead.accept(*call_format.opens)):
                break
        while (yield from ahead.accept("`", "~")):
            pass
        yield from ahead.space()
        return bool((yield from ahead.peek())) and not self._source.cut
