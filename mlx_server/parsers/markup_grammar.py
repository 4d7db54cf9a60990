"""The grammar of a whole answer, for families that mark reasoning and calls in its text.

What it allows, MarkupParser reads: a mark means here what it means there, where it stands.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from mlx_server import limits
from mlx_server.grammars.formats import format_rule, is_verbatim
from mlx_server.grammars.lark import Lark
from mlx_server.messages import Tool
from mlx_server.parsers.free_text import FreeTextRule
from mlx_server.parsers.markup import MarkupLayout
from mlx_server.parsers.output_spec import OutputSpec
from mlx_server.requests import Format, NamedTool
from mlx_server.tool_parsers.blocks import block_rule, empty_block, one_of, unmarked_block_rule
from mlx_server.tool_parsers.call_format import BlockGrammar, UnmarkedBlockGrammar

SPACE = r"/[\x20\n]{1,2}/"
"""Between the parts of an answer that may have nothing else between them."""


def markup_grammar(layout: MarkupLayout, spec: OutputSpec) -> str | None:
    tools = spec.context.tools
    match spec.choice:
        case NamedTool(name):
            named = [tool for tool in tools if tool.name == name]
            return RequiredGrammar(layout, spec).one_call(named)
        case "required":
            return RequiredGrammar(layout, spec).calls(tools)
        case "auto" if spec.format and tools:
            return RequiredGrammar(layout, spec).calls_or_text(tools, spec.format)
        case _ if spec.format:
            return RequiredGrammar(layout, spec).text(spec.format)
        case "auto" | "none" if tools:
            return FreeGrammar(layout, spec).whole()
    return None


class MarkupGrammar:
    def __init__(self, layout: MarkupLayout, spec: OutputSpec) -> None:
        self.lark = Lark(spec.context.control)
        self.layout = layout
        self.control = spec.context.control
        self.ends_with = spec.context.ends_with
        self.inside = layout.inside(self.ends_with)
        self.thinks = spec.thinks
        # a mark that begins with another one says no more than that
        self.reasoning = [
            (opening, closing)
            for opening, closing in layout.reasoning
            if not any(o != opening and opening.startswith(o) for o in layout.opens_reasoning)
        ]
        blocks = [
            (notation, block) for notation in layout.call_formats for block in notation.blocks
        ]
        bare = [block for _, block in blocks if isinstance(block, UnmarkedBlockGrammar)]
        self.unmarked = list(dict.fromkeys(bare))
        self.marked = [
            (mark, block)
            for notation, block in blocks
            for mark in notation.opens
            if not isinstance(block, UnmarkedBlockGrammar)
        ]

    def known(self) -> list[str]:
        """All marks of the family."""
        layout = self.layout
        calls = (m for n in layout.call_formats for m in (*n.opens, *n.closes, *n.inner))
        pairs = (mark for pair in layout.reasoning for mark in pair)
        return list(dict.fromkeys([*pairs, *calls, *layout.ends_reasoning, *layout.dropped]))

    def free_text(
        self, meant: Sequence[str], but: Sequence[str], free: Sequence[int]
    ) -> FreeTextRule:
        """Text up to marks that mean something. but: marks that can't be in it. free: control
        tokens that may, unless one of those marks is made with them."""
        marks = (*meant, *but)
        first = self.lark.first_control
        begin = {first(mark) for mark in marks} - {""}
        passed = [
            mark
            for mark in self.known()
            if first(mark) in begin - {mark} and not mark.startswith(marks)
        ]
        text = self.lark.anything(*(mark for mark in but if not first(mark)))
        return FreeTextRule(
            self.lark, text, [id for id in free if self.control[id] not in begin], passed
        )


class RequiredGrammar(MarkupGrammar):
    """Reasoning, if there is any, and then nothing but what is wanted."""

    def __init__(self, layout: MarkupLayout, spec: OutputSpec) -> None:
        taught = tuple(n for n in layout.call_formats if n.blocks and not n.repairs)
        super().__init__(replace(layout, call_formats=taught) if taught else layout, spec)
        self._all_calls = layout.calls
        self._verbatim = is_verbatim(spec.format)

    def one_call(self, tools: Sequence[Tool]) -> str | None:
        return self._whole(self._marked(tools, several=False), self._bare(tools, several=False))

    def calls(self, tools: Sequence[Tool]) -> str | None:
        return self._whole(self._several(tools), self._bare(tools, several=True))

    def text(self, format: Format) -> str | None:
        return self._whole(texts=[format_rule(format, self.lark)])

    def calls_or_text(self, tools: Sequence[Tool], format: Format) -> str | None:
        if self.marked:
            self.unmarked = []  # can't be told from formatted text
        bare = self._bare(tools, several=True)
        return self._whole(self._several(tools), bare, [format_rule(format, self.lark)])

    def _several(self, tools: Sequence[Tool]) -> list[str]:
        marked = self._marked(tools, several=True)
        calls = f"({one_of(marked)})"
        return [f"{calls} ({self._space()} {calls})*"] if marked else []

    def _marked(self, tools: Sequence[Tool], *, several: bool) -> list[str]:
        return [
            f"{self.lark.text(mark)} {block_rule(block, self.lark, tools, several=several)}"
            for mark, block in self.marked
        ]

    def _bare(self, tools: Sequence[Tool], *, several: bool) -> list[str]:
        return [unmarked_block_rule(b, self.lark, tools, several=several) for b in self.unmarked]

    def _whole(
        self, marked: Sequence[str] = (), bare: Sequence[str] = (), texts: Sequence[str] = ()
    ) -> str | None:
        """marked: calls. texts: to whose end all is text, so nothing may stand behind them."""
        if not (marked or bare or texts):
            return None
        stray = one_of(self.lark.text(mark) for mark in self.layout.dropped)
        # a blank behind one would be a part of the text
        before = f"({stray}){{0,{limits.STRAY_MARKS.value}}}" if stray else ""
        behind = f"({self._space()} ({stray})){{0,{limits.STRAY_MARKS.value}}}" if stray else ""
        calls = [f"{before} ({one_of(marked)}) {behind}"] if marked else []
        formatted = [f"{before} {text}" for text in texts]
        return self.lark.source(f"{self._reasoned()} ({one_of([*calls, *formatted, *bare])})")

    def _reasoned(self) -> str:
        if self.inside:
            return self._closed(self.inside)
        closings = tuple(closing.rstrip() for _, closing in self.reasoning)
        if not (self.thinks and closings) or self.ends_with.rstrip().endswith(closings):
            return ""
        blocks = (f"{self.lark.text(o)} {self._closed(c)}" for o, c in self.reasoning)
        return f"({one_of(blocks)})?"

    def _closed(self, closing: str) -> str:
        """Only the family's own control tokens: any other could be an end of the answer."""
        spelled = self.known()
        own = [id for id, token in self.control.items() if any(token in mark for mark in spelled)]
        others = self._all_calls if self.layout.calls_end_reasoning else ()
        ends = tuple(mark for mark in (*self.layout.ends_of_reasoning, *others) if mark != closing)
        return f"{self.free_text([closing], ends, own).up_to(closing)} {self._after_reasoning()}"

    def _after_reasoning(self) -> str:
        """Nothing that could be taken for the beginning of a text."""
        return self.lark.text(self.layout.after_reasoning) if self._verbatim else self._space()

    def _space(self) -> str:
        trims = self.layout.trims and self.layout.trims_text
        return f"{self.lark.terminal(SPACE)}?" if trims else ""


class FreeGrammar(MarkupGrammar):
    """Any answer, but for the calls in it.

    It goes from state to state: where it begins, also behind reasoning, it may be a call that has
    no mark; then there is its text, reasoning, and what follows a call that nothing ends.
    """

    def __init__(self, layout: MarkupLayout, spec: OutputSpec) -> None:
        super().__init__(layout, spec)
        self._tools = spec.context.tools
        self._constrains = bool(self.marked or self.unmarked)
        self._but: tuple[str, ...] = ()
        self._heads = [block.head(tool) for block in self.unmarked for tool in self._tools]
        if spec.choice == "none":
            self._but = layout.calls
            self.marked, self.unmarked = [], []
        meant = [*(opening for opening, _ in self.reasoning), *(mark for mark, _ in self.marked)]
        self._free_text = self.free_text(meant, self._but, list(self.control))
        self._states: dict[str, str] = {}

    def whole(self) -> str | None:
        if not (self._constrains or self._but):
            return None
        return self.lark.source(self._reasoning(self.inside) if self.inside else self._beginning())

    def _state(self, key: str, made: Callable[[], list[str]]) -> str:
        """Made once; states lead back to each other."""
        if key not in self._states:
            self._states[key] = self.lark.later()
            self.lark.define(self._states[key], one_of(made()))
        return self._states[key]

    def _beginning(self) -> str:
        def made() -> list[str]:
            blocks = ((block, self._unmarked(block)) for block in self.unmarked)
            calls = [f"{written} {self._after_block(block)}" for block, written in blocks]
            return [*self._continue(self._less(self._heads)), *calls]

        return self._state("beginning", made) if self._heads else self._text_state()

    def _text_state(self) -> str:
        return self._state("text", lambda: self._continue(self._free_text))

    def _after_block(self, block: BlockGrammar) -> str:
        if not block.read_on:
            return self._text_state()
        return self._state(block.read_on, lambda: self._continue(self._less([block.read_on])))

    def _reasoning(self, closing: str) -> str:
        def made() -> list[str]:
            ends = (closing, *self.layout.ends_reasoning)
            marked = self.marked if self.layout.calls_end_reasoning else []
            but = self._but if self.layout.calls_end_reasoning else ()
            prose = self.free_text([*ends, *(mark for mark, _ in marked)], but, list(self.control))
            over = [f"{prose.up_to(mark)} {self._beginning()}" for mark in ends]
            cut_short = [f"{prose.up_to(mark)} {self._called(block)}" for mark, block in marked]
            return [prose.rest(), *over, *cut_short]

        return self._state(closing, made)

    def _continue(self, prose: FreeTextRule) -> list[str]:
        """From a text to what may follow it."""
        reasoning = [f"{prose.up_to(o)} {self._reasoning(c)}" for o, c in self.reasoning]
        calls = [f"{prose.up_to(mark)} {self._called(block)}" for mark, block in self.marked]
        return [prose.rest(), *reasoning, *calls]

    def _called(self, block: BlockGrammar) -> str:
        call = block_rule(block, self.lark, self._tools, several=True)
        empty = [empty_block(block, self.lark)] if block.may_be_empty else []
        return f"({one_of([call, *empty])}) {self._after_block(block)}"

    def _unmarked(self, block: UnmarkedBlockGrammar) -> str:
        return unmarked_block_rule(block, self.lark, self._tools, several=True, space=r"\s*")

    def _less(self, beginnings: Sequence[str]) -> FreeTextRule:
        """Text that does not begin as one of these regular expressions says."""
        begun = self.lark.terminal(f"/\\s*({'|'.join(beginnings)})/ {self.lark.anything()}")
        return self._free_text.starting_with(
            self.lark.terminal(f"{self._free_text.text} & ~{begun}")
        )
