"""The grammar of a whole answer, for families that delimit reasoning and calls within its text.

MarkupParser reads whatever the grammar allows: delimiters have the same meaning in both.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

from mlx_server.engine.messages import Grammar
from mlx_server.grammars.formats import format_rule, is_verbatim
from mlx_server.grammars.lark import Lark, literally
from mlx_server.messages import Tool
from mlx_server.parsers.markup_layout import MarkupLayout
from mlx_server.parsers.parse_context import OutputSpec, is_tag
from mlx_server.requests import Format, JsonFormat, NamedTool
from mlx_server.tool_parsers.call_format import (
    BlockGrammar,
    UnmarkedBlockGrammar,
    block_rule,
    empty_block,
    one_of,
    writable,
)


@dataclass(frozen=True)
class FreeTextRule:
    """Free text, which goes on to a delimiter or to the end of the answer."""

    lark: Lark
    text: str
    """A terminal: the text allowed between control tokens."""
    free: Sequence[int] = ()
    """Ids of the control tokens that are allowed in the text."""
    ignored_delimiters: Sequence[str] = ()
    """Delimiters that are allowed in the text, although their control token alone is not."""
    first: str = field(default="", kw_only=True)
    """A terminal: the text allowed before the first of these control tokens and delimiters, if it
    is restricted further."""
    first_before_control: str = field(default="", kw_only=True)
    """A terminal: the same, for text after which such a control token or delimiter follows."""

    def starting_with(self, first: str, before_control: str = "") -> "FreeTextRule":
        return replace(self, first=first, first_before_control=before_control or first)

    def up_to(self, delimiter: str) -> str:
        return self._ended(lambda text: self.lark.up_to(delimiter, text))

    def rest(self) -> str:
        """Returns the rule of free text to the end of the answer."""
        return self._ended(lambda text: text)

    def _ended(self, end: Callable[[str], str]) -> str:
        """Returns the rule of free text; `end` makes its last part from a terminal."""
        steps = self._steps(self.text)
        run = self.lark.rule(f"({one_of(steps)})*") if steps else ""
        later = f"{run} {end(self.text)}"
        if not self.first:
            return later
        first = self._steps(self.first_before_control)
        longer = [f"({one_of(first)}) {later}"] if first else []
        return self.lark.rule(one_of([end(self.first), *longer]))

    def _steps(self, text: str) -> list[str]:
        """Returns alternatives for text up to and including the next control token."""
        free = [f"{text} <[{_ranges(self.free)}]>"] if self.free else []
        return free + [self.lark.up_to(ignored, text) for ignored in self.ignored_delimiters]


def _ranges(ids: Iterable[int]) -> str:
    pairs = enumerate(sorted(ids))
    runs = [[id for _, id in run] for _, run in groupby(pairs, lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" for run in runs)


SPACE_AFTER_CALLS = r"/\s{0,4}/"
"""White space after calls. It is limited, because a small model would write it for ever."""

SPACE = r"/[\x20\n]{1,2}/"
"""White space that is allowed between two parts of an answer without text between them."""

STRAY_DELIMITERS = 2
"""The most stray delimiters before and after a call."""


def markup_grammar(
    layout: MarkupLayout, spec: OutputSpec, stop_tokens: Sequence[str]
) -> Grammar | None:
    tools = spec.context.tools
    match spec.choice:
        case NamedTool(name):
            named = [tool for tool in tools if tool.name == name]
            return RequiredGrammar(layout, spec, stop_tokens).one_call(named)
        case "required":
            return RequiredGrammar(layout, spec, stop_tokens).calls(tools)
        case "auto" if spec.format and tools:
            return RequiredGrammar(layout, spec, stop_tokens).calls_or_text(tools, spec.format)
        case _ if spec.format:
            return RequiredGrammar(layout, spec, stop_tokens).text(spec.format)
        case "auto" | "none" if tools:
            return FreeGrammar(layout, spec).whole()
    return None


class MarkupGrammar:
    def __init__(self, layout: MarkupLayout, spec: OutputSpec) -> None:
        self.lark = Lark(spec.context.control)
        self.layout = layout
        self.control = spec.context.control
        self.ends_with = spec.context.ends_with
        self.continues_text = spec.context.continues_text
        self.inside = layout.inside(self.ends_with)
        self.thinks = spec.thinks
        # a delimiter that begins with another one is covered by it
        self.reasoning = [
            (opening, closing)
            for opening, closing in layout.reasoning
            if not any(o != opening and opening.startswith(o) for o in layout.opens_reasoning)
        ]
        blocks = [
            (call_format, block)
            for call_format in layout.call_formats
            for block in call_format.blocks
        ]
        bare = [block for _, block in blocks if isinstance(block, UnmarkedBlockGrammar)]
        self.unmarked = list(dict.fromkeys(bare))
        self.marked = [
            (opening, block)
            for call_format, block in blocks
            for opening in call_format.opens
            if not isinstance(block, UnmarkedBlockGrammar)
        ]

    def known(self) -> list[str]:
        """Returns all delimiters of the family."""
        layout = self.layout
        calls = (m for n in layout.call_formats for m in (*n.opens, *n.closes, *n.inner))
        pairs = (delimiter for pair in layout.reasoning for delimiter in pair)
        return list(dict.fromkeys([*pairs, *calls, *layout.ends_reasoning, *layout.dropped]))

    def free_text(
        self, ending: Sequence[str], banned: Sequence[str], free: Sequence[int]
    ) -> FreeTextRule:
        """Returns the rule of text before an `ending` delimiter. It can't contain the `banned`
        ones; it may contain the control tokens `free`, unless a delimiter of either kind begins
        with them."""
        delimiters = (*ending, *banned)
        first = self.lark.first_control
        begin = {first(delimiter) for delimiter in delimiters} - {""}
        ignored = [
            delimiter
            for delimiter in self.known()
            if first(delimiter) in begin - {delimiter} and not delimiter.startswith(delimiters)
        ]
        text = self.lark.anything(*(each for each in banned if not first(each)))
        return FreeTextRule(
            self.lark, text, [id for id in free if self.control[id] not in begin], ignored
        )


class RequiredGrammar(MarkupGrammar):
    """Optional reasoning, followed by exactly the required calls or formatted text."""

    def __init__(self, layout: MarkupLayout, spec: OutputSpec, stop_tokens: Sequence[str]) -> None:
        taught = tuple(n for n in layout.call_formats if n.blocks and not n.repairs)
        super().__init__(replace(layout, call_formats=taught) if taught else layout, spec)
        self._all_calls = layout.calls
        self._stop_tokens = stop_tokens
        self._verbatim = is_verbatim(spec.format)

    def one_call(self, tools: Sequence[Tool]) -> Grammar | None:
        return self._whole(self._marked(tools, several=False), self._bare(tools, several=False))

    def calls(self, tools: Sequence[Tool]) -> Grammar | None:
        return self._whole(self._several(tools), self._bare(tools, several=True))

    def text(self, format: Format) -> Grammar | None:
        return self._whole(texts=[format_rule(format, self.lark)])

    def calls_or_text(self, tools: Sequence[Tool], format: Format) -> Grammar | None:
        as_json: list[str] = []
        if self.marked:  # the beginnings of others are indistinguishable from formatted text
            unmarked = self.unmarked if isinstance(format, JsonFormat) else []
            rules = [b.as_json for b in unmarked if b.as_json is not None]
            as_json = [one_of(writable(partial(rule, self.lark), tools)) for rule in rules]
            self.unmarked = [b for b in unmarked if b.begins_with_name]
        bare = [*self._bare(tools, several=True), *as_json]
        return self._whole(self._several(tools), bare, [format_rule(format, self.lark)])

    def _several(self, tools: Sequence[Tool]) -> list[str]:
        marked = self._marked(tools, several=True)
        calls = f"({one_of(marked)})"
        return [f"{calls} ({self._space()} {calls})*"] if marked else []

    def _marked(self, tools: Sequence[Tool], *, several: bool) -> list[str]:
        def rule(marked: tuple[str, BlockGrammar]) -> str:
            opening, block = marked
            calls = block_rule(block, self.lark, tools, several=several)
            return f"{self.lark.text(opening)} {calls}"

        return writable(rule, self.marked)

    def _bare(self, tools: Sequence[Tool], *, several: bool) -> list[str]:
        return [block_rule(b, self.lark, tools, several=several) for b in self.unmarked]

    def _whole(
        self, marked: Sequence[str] = (), bare: Sequence[str] = (), texts: Sequence[str] = ()
    ) -> Grammar | None:
        """Returns the grammar of the answer. Nothing may follow `texts`, which extend to its
        end."""
        if not (marked or bare or texts):
            return None
        dropped, most = self.layout.dropped, STRAY_DELIMITERS
        # a delimiter with a stop token would end the answer before the required part
        first = [each for each in dropped if not any(stop in each for stop in self._stop_tokens)]
        # no space after them, since it would be a part of the text
        before = f"({self._one_of_texts(first)}){{0,{most}}}" if first else ""
        after = f"({self._space()} ({self._one_of_texts(dropped)})){{0,{most}}}" if dropped else ""
        calls = [f"{before} ({one_of(marked)}) {after}"] if marked else []
        formatted = [f"{before} {text}" for text in texts]
        return self.lark.source(f"{self._reasoned()} ({one_of([*calls, *formatted, *bare])})")

    def _one_of_texts(self, texts: Sequence[str]) -> str:
        return one_of(self.lark.text(text) for text in texts)

    def _reasoned(self) -> str:
        if self.inside:
            return self._closed(self.inside)
        closings = tuple(closing.rstrip() for _, closing in self.reasoning)
        if not (self.thinks and closings) or self.ends_with.rstrip().endswith(closings):
            return ""
        blocks = (f"{self.lark.text(o)} {self._closed(c)}" for o, c in self.reasoning)
        return f"({one_of(blocks)})?"

    def _closed(self, closing: str) -> str:
        """Reasoning up to `closing`. It may contain only the control tokens of the family's
        delimiters: any other could end the answer."""
        known = self.known()
        own = [id for id, token in self.control.items() if any(token in each for each in known)]
        others = self._all_calls if self.layout.calls_end_reasoning else ()
        ends = tuple(end for end in (*self.layout.ends_of_reasoning, *others) if end != closing)
        return f"{self.free_text([closing], ends, own).up_to(closing)} {self._after_reasoning()}"

    def _after_reasoning(self) -> str:
        """White space after reasoning that can't be taken for the beginning of a text."""
        return self.lark.text(self.layout.after_reasoning) if self._verbatim else self._space()

    def _space(self) -> str:
        trims = self.layout.trims and self.layout.trims_text
        return f"{self.lark.terminal(SPACE)}?" if trims else ""


class FreeGrammar(MarkupGrammar):
    """Any answer, in which only the calls are constrained.

    The grammar is a state machine. Before any text, and after calls and reasoning, reasoning may
    open; at the beginning and after reasoning there may be a call without a delimiter. The other
    states are text, reasoning, and text after a call without a closing delimiter.
    """

    def __init__(self, layout: MarkupLayout, spec: OutputSpec) -> None:
        super().__init__(layout, spec)
        self._tools = spec.context.tools
        self._constrains = bool(self.marked or self.unmarked)
        self._banned: tuple[str, ...] = ()
        self._heads = [block.head(tool) for block in self.unmarked for tool in self._tools]
        if spec.choice == "none":
            self._banned = layout.calls
            self.marked, self.unmarked = [], []
        self._tags = [pair for pair in self.reasoning if is_tag(pair[0])]
        """Delimiters of reasoning that are text within a text."""
        self._anywhere = [pair for pair in self.reasoning if pair not in self._tags]
        opens = [opening for opening, _ in (*self._anywhere, *self.marked)]
        self._free_text = self.free_text(opens, self._banned, list(self.control))
        self._states: dict[str, str] = {}
        self._calls: dict[int, str] = {}
        """The rule of a block, which is written once for all states that call."""
        formats = [(block, each) for each in layout.call_formats for block in each.blocks]
        self._format_of = {id(block): each for block, each in formats}

    def whole(self) -> Grammar | None:
        if not (self._constrains or self._banned):
            return None
        if self.continues_text:
            return self.lark.source(self._state("text", lambda: self._continue(self._free_text)))
        return self.lark.source(self._reasoning(self.inside) if self.inside else self._beginning())

    def _state(self, key: str, rules: Callable[[], list[str]]) -> str:
        """Returns the rule of a state, defined once, since states refer to each other."""
        if key not in self._states:
            self._states[key] = self.lark.later()
            self.lark.define(self._states[key], one_of(rules()))
        return self._states[key]

    def _beginning(self) -> str:
        def options() -> list[str]:
            rule = partial(
                block_rule, lark=self.lark, tools=self._tools, several=True, space=r"\s*"
            )
            calls = [f"{rule(block)} {self._after_block(block)}" for block in self.unmarked]
            text = self._not_starting(self._heads, self._tags) if self._heads else self._free_text
            return [*self._thoughts(), *self._continue(text), *calls]

        return self._state("beginning", options)

    def _thoughts(self) -> list[str]:
        # space and tag are one, or a text that begins with the tag would be as good a reading
        space = self.lark.terminal(r"/\s*/")
        return [f"{self.lark.up_to(o, space)} {self._reasoning(c)}" for o, c in self._tags]

    def _after_block(self, block: BlockGrammar) -> str:
        call_format = self._format_of[id(block)]
        if call_format.ends_answer:
            return self._after_calls(() if block.after else call_format.closes)
        if not block.read_on:
            return self._state(
                "after call", lambda: [*self._thoughts(), *self._continue(self._free_text)]
            )
        return self._state(
            block.read_on,
            lambda: [*self._thoughts(), *self._continue(self._not_starting([block.read_on]))],
        )

    def _after_calls(self, closes: Sequence[str] = ()) -> str:
        """Returns the rule of another call or the end. closes: delimiters of the last call that may
        remain."""

        def options() -> list[str]:
            space = self.lark.terminal(SPACE_AFTER_CALLS)
            calls = [f"{space} {self.lark.text(o)} {self._called(b)}" for o, b in self.marked]
            dropped = [*closes, *self.layout.dropped]
            rest = [f"{space} {self.lark.text(each)} {self._after_calls()}" for each in dropped]
            return [space, *calls, *rest]

        return self._state(f"after calls {closes}", options)

    def _reasoning(self, closing: str) -> str:
        def options() -> list[str]:
            ends = (closing, *self.layout.ends_reasoning)
            marked = self.marked if self.layout.calls_end_reasoning else []
            banned = self._banned if self.layout.calls_end_reasoning else ()
            opens = [opening for opening, _ in marked]
            text = self.free_text([*ends, *opens], banned, list(self.control))
            ended = [f"{text.up_to(end)} {self._beginning()}" for end in ends]
            calls = [f"{text.up_to(opening)} {self._called(block)}" for opening, block in marked]
            return [text.rest(), *ended, *calls]

        return self._state(closing, options)

    def _continue(self, text: FreeTextRule) -> list[str]:
        """Returns alternatives for a text and what may follow it."""
        reasoning = [f"{text.up_to(o)} {self._reasoning(c)}" for o, c in self._anywhere]
        calls = [f"{text.up_to(opening)} {self._called(block)}" for opening, block in self.marked]
        return [text.rest(), *reasoning, *calls]

    def _called(self, block: BlockGrammar) -> str:
        if id(block) not in self._calls:
            call = block_rule(block, self.lark, self._tools, several=True)
            empty = [empty_block(block, self.lark)] if block.may_be_empty else []
            self._calls[id(block)] = one_of([call, *empty])
        return f"({self._calls[id(block)]}) {self._after_block(block)}"

    def _not_starting(
        self, beginnings: Sequence[str], tags: Sequence[tuple[str, str]] = ()
    ) -> FreeTextRule:
        """Returns the rule of text that begins with no match of these regular expressions, nor with
        a tag."""
        spelled = [literally(opening) for opening, _ in tags]
        begun = self.lark.terminal(
            f"/\\s*({'|'.join([*beginnings, *spelled])})/ {self.lark.anything()}"
        )
        first = self.lark.terminal(f"{self._free_text.text} & ~{begun}")
        if not tags:
            return self._free_text.starting_with(first)
        # a tag that is a control token opens reasoning, so such a token needs text before it
        begins = self.lark.terminal(f"{first} & /(?s:\\s*\\S.*)/")
        return self._free_text.starting_with(first, begins)
