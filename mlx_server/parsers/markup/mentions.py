"""Distinguishes delimiters that structure an answer from those that its text mentions."""

import re

from mlx_server.parsers.markup.delimiters import QUOTES, MarkupDelimiters
from mlx_server.parsers.markup.output import MarkupOutput
from mlx_server.tool_parsers.source import Lookahead, Source, Steps

MARKS = "`*_>-#\"' \t"
"""Characters around the words of a line."""
SENTENCE_ENDS = frozenset(".!?。！？")
CONTINUES = frozenset(",;:.)!?")
"""The characters with which a sentence goes on after a call that is shown in it."""
TICKS = re.compile("`+")
CLOSING_FENCES = ("\n```", "\n~~~")
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

    def line_before(self, already: str) -> str:
        """Returns the text on the line of a call. already: the call's beginning, and the white
        space before it."""
        begun = already.lstrip()
        space = already[: len(already) - len(begun)]
        return "" if "\n" in space else self._output.line + space

    def is_prose(
        self, before: str, ahead: Lookahead, *, lacks: bool = False, inline: bool = False
    ) -> Steps[bool]:
        """Whether a call that was just read is shown in a line of prose or in inline code, which
        goes on after it. A call next to whole sentences is made.

        before: the text on the line before the call. lacks: whether required arguments of the call
        are missing: then text on one of its sides will do. inline: whether models write such calls
        within a line.
        """
        words = before.strip(MARKS)
        in_code = before.endswith("`") and bool((yield from ahead.run(TICKS)))
        if before.endswith("`") and not (yield from ahead.peek()):
            in_code = in_code or self._source.cut
        yield from ahead.run(BLANKS)
        following = ""
        if not (yield from ahead.accept(*self._delimiters.all)):
            following = (yield from ahead.peek()).strip()
        if in_code:
            return bool(words or following) or lacks
        is_sentence = words[-1:] in SENTENCE_ENDS
        if lacks:
            return bool(following or (words and not is_sentence))
        if inline:
            return False
        goes_on = following.islower() or following in CONTINUES
        return bool(words and following) and (goes_on or not is_sentence)

    def is_example(self, delimiter: str) -> Steps[bool]:
        """Whether the call that a delimiter opens is shown in a block of code: one that is not all
        of the block, or after which the answer goes on."""
        call_format = self._delimiters.formats.get(delimiter)
        if not (call_format and self._output.in_code):
            return False
        ahead = self._source.lookahead()
        while (yield from ahead.up_to(*(call_format.closes or CLOSING_FENCES))):
            yield from ahead.space()
            if not (yield from ahead.accept(*call_format.opens)):
                break
        while (yield from ahead.accept("`", "~")):
            pass
        yield from ahead.space()
        return bool((yield from ahead.peek())) and not self._source.cut
