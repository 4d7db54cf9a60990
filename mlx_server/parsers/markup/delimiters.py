"""The delimiters of an answer, by what they do there."""

from collections.abc import Mapping

from mlx_server.parsers.markup.layout import MarkupLayout
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.parsers.reasoning_tags import is_tag
from mlx_server.tool_parsers.call_format import CallFormat
from mlx_server.tool_parsers.foreign_formats import FOREIGN_FORMATS
from mlx_server.tool_parsers.respelled import respelled_delimiter

QUOTES = ("`", '"', "'", "“", "”", "‘", "’")
"""Characters that stand around a delimiter that a text is about."""


class MarkupDelimiters:
    def __init__(self, layout: MarkupLayout, context: ParseContext) -> None:
        own_formats = {opening: n for n in layout.call_formats for opening in n.opens}
        foreign = FOREIGN_FORMATS if context.reads_misplaced_calls else ()
        inline = layout.inline_formats(context.tools) if context.reads_misplaced_calls else ()
        self.first_formats = {o: n for n in foreign for o in n.opens} | own_formats
        """Call formats by the delimiters that open calls, also where a text begins."""
        self.formats = {o: n for n in inline for o in n.opens} | self.first_formats
        """Call formats by the delimiters that open calls within a text."""
        self.inline_formats = inline
        self.uncertain_formats = (*foreign, *inline)
        """The formats of those delimiters that a text about calls may contain as examples."""
        self.own = dict(layout.reasoning)
        """Closing delimiters of reasoning by the opening ones."""
        self.dropped_first = tuple(d for d in layout.dropped if d.startswith(tuple(self.own)))
        """Delimiters without a meaning that begin like an opening one of reasoning."""
        self._worded_closes = tuple(closing for _, closing in layout.worded_reasoning)
        self.empty_thoughts = tuple(o.rstrip() + c for o, c in layout.reasoning if o != o.rstrip())
        """Thoughts without text, whose opening delimiter lacks its white space."""
        self.closing_tags = frozenset(c for o, c in self.own.items() if is_tag(o))
        tags = () if context.formatted else context.reasoning_tags
        self.foreign: Mapping[str, str] = {o: c for o, c in tags if o not in self.own}
        """Closing tags of reasoning by the opening ones, for tags that the family does not have."""
        self.reasoning = {**self.foreign, **self.own}
        closes = [each for n in layout.call_formats for each in n.closes]
        self.untaught_closes = tuple(each for n in layout.call_formats for each in n.may_close)
        """Closing delimiters that models write after calls although no template has them."""
        ends = (*closes, *self.untaught_closes, *layout.dropped)
        removed = (*self.empty_thoughts, *layout.transparent)
        stops = (each for stop in layout.stops for each in (stop, *respelled_delimiter(stop)))
        at_end = (*stops, *(layout.torn if layout.halves else ()))
        spelled = (each for each in at_end if each not in context.control.values())
        is_free = not (context.continues_text or context.formatted)
        self.spelled_stops = tuple(dict.fromkeys(spelled)) if is_free else ()
        """Stop tokens that the vocabulary lacks: at the end of an answer they are spelled out."""
        self.all = (*self.own, *self.own.values(), *self.formats, *ends, *removed)
        """The delimiters that mean something anywhere in an answer."""
        self.after_calls = ends
        known = (*self.all, *(inner for n in layout.call_formats for inner in n.inner))
        self.tokens = {
            id: token
            for id, token in context.control.items()
            if any(token in delimiter for delimiter in known)
        }
        """Control tokens that are delimiters or parts of them."""
        self.end_of_reasoning = layout.ends_reasoning
        self.calls_in_reasoning = tuple(own_formats) if layout.calls_end_reasoning else ()

    @property
    def first(self) -> tuple[str, ...]:
        """The delimiters that may come before any text, except those that open calls."""
        tags = (*self.reasoning, *self.foreign.values(), *self.empty_thoughts)
        return (*tags, *self.dropped_first)

    def is_foreign(self, delimiter: str) -> bool:
        return delimiter in self.foreign or delimiter in self.foreign.values()

    def is_inline(self, call_format: CallFormat, opening: str) -> bool:
        """Whether models write such a call within a line of text: one without delimiters, or one
        that a control token opens, which no text about calls has."""
        is_bare = any(call_format is each for each in self.inline_formats)
        return is_bare or any(token in opening for token in self.tokens.values())

    def closes(self, closing: str) -> tuple[str, ...]:
        """Returns the delimiters that close a thought. The family's own tag may also close the tag
        of another family, and any of the closing words the thought that words opened."""
        if closing in self._worded_closes:
            return self._worded_closes
        own = [c for o, c in self.own.items() if is_tag(o)]
        return (closing, *(own if closing in self.foreign.values() else ()))

    def opens_within(self, closing: str) -> tuple[str, ...]:
        """Returns the tags that open another thought within one that `closing` ends."""
        closes = self.closes(closing)
        return tuple(o for o, c in self.reasoning.items() if c in closes and is_tag(o))

    def opens(self, closing: str) -> tuple[str, ...]:
        return tuple(o for o, c in self.reasoning.items() if c == closing)

    def split_reasoning(self, inside: str) -> tuple[str, str]:
        """Splits misplaced reasoning from the start of a call; "" if there is none."""
        text = inside.strip()
        for opening, closing in self.own.items():
            thought, closed, rest = text.removeprefix(opening).partition(closing)
            if text.startswith(opening) and closed:
                return thought.strip(), rest
        return "", inside
