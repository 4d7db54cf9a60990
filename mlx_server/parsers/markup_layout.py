"""The parts of a family's answers, and the delimiters between them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlx_server.messages import Tool
from mlx_server.parsers.parse_context import THINK, USUAL_TAGS, Pair, ParseContext, is_tag
from mlx_server.tool_parsers.call_format import CallFormat, respelled_delimiter
from mlx_server.tool_parsers.calls import new_id
from mlx_server.tool_parsers.formats import FOREIGN_FORMATS

# A prompt ends with such a header. A model may write it once more, and a server may pass it on: at
# the beginning of an answer it is no part of the text.
TURN_HEADERS = (
    "<|im_start|>assistant",
    "<|start_header_id|>assistant<|end_header_id|>",
    "<|header_start|>assistant<|header_end|>",
    "<|start_of_role|>assistant<|end_of_role|>",
    "<|im_assistant|>assistant<|im_middle|>",
    "<start_of_turn>model",
    "<|turn>model",
    "<|assistant|>",
    "<|assistant_start|>",
    "<|begin_assistant|>",
    "<|bom|><|assistant|>",
    "<｜Assistant｜>",
    "[|assistant|]",
    "<role>ASSISTANT</role>",
    "<longcat_assistant>",
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
)


@dataclass(frozen=True)
class Header:
    """The beginning of a message, which may name its recipient."""

    opens: str
    """The delimiter before the name."""
    ends: tuple[str, ...]
    """The delimiters after the name. The name is no part of the message's text."""
    prefix: str = ""
    """The text before the name."""
    calls: bool = False
    """Whether the name is that of the tool which the message calls."""


@dataclass(frozen=True)
class MarkupLayout:
    reasoning: tuple[Pair, ...] = (THINK,)
    """Pairs of an opening and a closing delimiter."""
    call_formats: tuple[CallFormat, ...] = ()
    inline_formats: Callable[[Sequence[Tool]], tuple[CallFormat, ...]] = lambda tools: ()
    """Call formats without delimiters, or with delimiters in other spellings, which a known tool's
    name identifies within a text."""
    dropped: tuple[str, ...] = ()
    """Delimiters without a meaning of their own, such as those of a section of calls."""
    header: Header | None = None
    """How messages begin, in families whose answers consist of several."""
    literal: tuple[str, ...] = ()
    """Those of `dropped` that open a message to the user, which may contain examples of calls."""
    transparent: tuple[str, ...] = ()
    """Delimiters that are removed from a text, while the white space around them stays."""
    trims: bool = True
    """Whether white space next to delimiters is removed."""
    trims_text: bool = True
    """Whether it is removed next to the answer's text too, and not only next to reasoning."""
    after_reasoning: str = ""
    """White space between reasoning and a text that may itself begin with white space."""
    stutters: bool = False
    """Whether models write a call twice although they decided on it once."""
    calls_end_reasoning: bool = False
    """Whether a call within reasoning ends it; if not, the call is part of the reasoning."""
    ends_reasoning: tuple[str, ...] = ()
    """Delimiters that end reasoning besides its closing one."""
    worded_reasoning: tuple[tuple[str, str], ...] = ()
    """Delimiters like `reasoning`, in words that mean nothing unless an answer begins with the
    first."""
    leads: tuple[str, ...] = ()
    """Texts before an answer that are no part of it. They mean nothing elsewhere."""
    halves: tuple[str, ...] = ()
    """Control tokens with which several delimiters begin, and that are no delimiter alone."""
    stops: tuple[str, ...] = ()
    """Stop tokens, which models served elsewhere may spell out at the end of an answer."""
    new_id: Callable[[], str] = new_id
    """Makes the ids of calls for which the model wrote none."""

    @property
    def calls(self) -> tuple[str, ...]:
        """The delimiters that open calls."""
        return tuple(opening for each in self.call_formats for opening in each.opens)

    @property
    def torn(self) -> tuple[str, ...]:
        """The beginnings of delimiters that have more than a control token; no text ends like
        this."""
        whole = (*self.opens_reasoning, *self.ends_of_reasoning, *self.calls, *self.dropped)
        return tuple(
            delimiter[:size]
            for delimiter in whole
            if delimiter.startswith(self.halves)
            for size in range(min(map(len, self.halves)), len(delimiter))
            if delimiter[:size].startswith(self.halves)
        )

    @property
    def opens_reasoning(self) -> tuple[str, ...]:
        return tuple(opening for opening, _ in self.reasoning)

    @property
    def ends_of_reasoning(self) -> tuple[str, ...]:
        closes = dict.fromkeys(closing for _, closing in self.reasoning)
        calls = self.calls if closes and self.calls_end_reasoning else ()
        return (*closes, *self.ends_reasoning, *calls)

    def inside(self, ends_with: str) -> str | None:
        """Returns the closing delimiter of the reasoning that the prompt's end opens; None if it
        opens none."""
        end = ends_with.rstrip()
        return next((c for o, c in self.reasoning if end.endswith(o.rstrip())), None)


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
        self.headers = {
            words: o for words, _ in layout.worded_reasoning for o in self.own if o.endswith(words)
        }
        """Opening delimiters by their words without the control token."""
        self.closing_tags = frozenset(c for o, c in self.own.items() if is_tag(o))
        tags = () if context.formatted else USUAL_TAGS
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
        inner = (each for n in layout.call_formats for each in n.inner)
        known = "\0".join((*self.all, *inner))  # some vocabularies have hundreds of control tokens
        self.tokens = {id: token for id, token in context.control.items() if token in known}
        """Control tokens that are delimiters or parts of them."""
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
