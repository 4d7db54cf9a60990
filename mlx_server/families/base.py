"""The record of a model family, with the defaults that most families share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import tokenizers

from mlx_server.checkpoints.checkpoint import Checkpoint
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.parsers.markup.grammar import markup_grammar
from mlx_server.parsers.markup.parser import MarkupLayout, MarkupParser
from mlx_server.parsers.output_spec import OutputSpec
from mlx_server.parsers.parse_context import ParseContext, Parser
from mlx_server.parsers.reasoning_tags import Pair
from mlx_server.prompts.continuation import ReasoningText
from mlx_server.prompts.history_rendering import WriteCalls, in_hermes_tags
from mlx_server.prompts.message_normalization import CallId
from mlx_server.prompts.template_prompt import (
    RenderedPrompt,
    RenderOptions,
    as_given,
    render_prompt,
)
from mlx_server.tool_parsers.blocks import unsupported_keywords
from mlx_server.tool_parsers.formats import HERMES

__all__ = ["FamilyOverrides", "ModelFamily", "RenderedPrompt"]


Renderer = Callable[[Checkpoint, Conversation], RenderedPrompt]


TEXT = MarkupLayout(reasoning=())

GrammarAfterReasoning = Callable[[OutputSpec, bool], str | None]

Delimiters = tuple[tuple[str, ...], tuple[str, ...]]
"""Opening delimiters and closing delimiters."""


@dataclass(frozen=True)
class FamilyOverrides:
    """Parsing and constraints of a family whose format no `MarkupLayout` can describe."""

    parser: Callable[[ParseContext], Parser]
    write: Callable[[Message], str]
    """Writes an answer as the model does."""
    grammar: Callable[[OutputSpec], str | None] = lambda spec: None
    thinking_delimiters: Delimiters = ((), ())
    end_of_reasoning: Callable[[OutputSpec], str] = lambda spec: ""
    """The text between reasoning and the requested output."""
    opening: Callable[[Message], str] = lambda begun: ""
    """The delimiter that precedes the text of a message that the answer continues."""
    grammar_after_reasoning: GrammarAfterReasoning = lambda spec, constrains: None
    """The grammar of what follows reasoning that was ended by its budget, if it differs from the
    rest of the answer's. `constrains`: whether calls have to follow their tool's schema."""


@dataclass(frozen=True)
class ModelFamily:
    name: str
    layout: MarkupLayout | Callable[[Sequence[Tool]], MarkupLayout] = TEXT
    """The parts of an answer and their delimiters, which depend on the tools in some families."""
    overrides: FamilyOverrides | None = None
    model_types: tuple[str, ...] = ()
    """`model_type` values of config.json; empty if `template_markers` identify the family alone."""
    template_markers: tuple[str, ...] = ()
    """Texts that the chat template must contain, if the model type alone is ambiguous."""
    stop_tokens: tuple[str, ...] = ()
    """Stop tokens besides the checkpoint's own; those not in the vocabulary are ignored."""
    shapes: tuple[str, str] = ("", "")
    """Reasoning and calls as the table of families shows them, if no layout describes them."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens for replay models, which have no vocabulary of their own."""
    replay_tokenizer: Callable[[], tokenizers.Tokenizer] | None = None
    """Tokenizer for replay models that need more than bytes and special tokens."""
    renderer: Renderer | None = None
    """Renders the prompts of a family for which chat templates do not suffice."""
    answer_prefix: str = ""
    """Text that continues an answer which stopped after its reasoning."""
    roles: tuple[tuple[str, str], ...] = (("developer", "system"),)
    """Roles that this family's templates know by another name, with that name."""
    call_id: CallId = as_given
    """Converts the ids of earlier calls, which another model or a client may have made."""
    reasoning_tags: tuple[Pair, ...] | None = None
    """Tags of reasoning that models.yaml adds to the family's own. None: those that models of any
    family write are recognised at the beginning of an answer, and reported."""
    write_calls: WriteCalls = in_hermes_tags
    """Renders earlier calls as the model writes them, for templates that leave them out."""
    tools_in_prompt: bool = False
    """Whether tools are described in the system prompt: see `with_tools_in_prompt`."""

    def evidence(self, checkpoint: Checkpoint) -> int:
        """Rates how well the checkpoint matches: 1 by model type, 2 by template, 3 by both. 0 if
        one of the family's conditions fails, or if it has none."""
        source = checkpoint.template_source
        if self.model_types and checkpoint.model_type not in self.model_types:
            return 0
        if not all(marker in source for marker in self.template_markers):
            return 0
        return bool(self.model_types) + 2 * bool(self.template_markers)

    def stops(self, checkpoint: Checkpoint) -> frozenset[int]:
        own = (checkpoint.tokenizer.id_of(token) for token in self.stop_tokens)
        return checkpoint.end_tokens | {token for token in own if token is not None}

    def layout_with(self, tools: Sequence[Tool] = ()) -> MarkupLayout:
        layout = self.layout if isinstance(self.layout, MarkupLayout) else self.layout(tools)
        layout = layout.with_reasoning(self.reasoning_tags or ())
        after_reasoning = self._after_reasoning(layout)
        return replace(layout, after_reasoning=after_reasoning, stops=self.stop_tokens)

    def _after_reasoning(self, layout: MarkupLayout) -> str:
        """The white space that the family writes after reasoning, as in the answer prefix."""
        trims = layout.trims and layout.trims_text
        return self.answer_prefix[len(self.answer_prefix.rstrip()) :] if trims else ""

    def make_parser(self, context: ParseContext) -> Parser:
        if self.reasoning_tags is not None:
            context = replace(context, reasoning_tags=self.reasoning_tags)
        if self.overrides:
            return self.overrides.parser(context)
        return MarkupParser(self.layout_with(context.tools), context)

    def grammar(self, spec: OutputSpec) -> str | None:
        """The grammar of a whole answer, in Lark; None if any text is valid."""
        if self.overrides:
            return self.overrides.grammar(spec)
        return markup_grammar(self.layout_with(spec.context.tools), spec, self.stop_tokens)

    def unsupported_keywords(self, tool: Tool) -> tuple[str, ...]:
        """`keyword at #/path` of each schema keyword that a non-strict tool's grammar omits."""
        return unsupported_keywords(
            () if self.overrides else self.layout_with((tool,)).call_formats, tool
        )

    def thinking_delimiters(self) -> Delimiters:
        """Delimiters that open reasoning, and those that close it, in any combination."""
        if self.overrides:
            return self.overrides.thinking_delimiters
        layout = self.layout_with()
        return layout.opens_reasoning, layout.ends_of_reasoning

    def call_delimiters(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Delimiters that open a call within the text of an answer."""
        return () if self.overrides else self.layout_with(tools).calls

    def invisible_delimiters(self) -> tuple[str, ...]:
        """Delimiters that are neither part of the text nor reported as an event."""
        opens, closes = self.thinking_delimiters()
        if self.overrides:
            return (*opens, *closes)
        layout = self.layout_with()
        ends = [delimiter for each in layout.call_formats for delimiter in each.closes]
        calls = [delimiter for delimiter in ends if delimiter.startswith(self.special_tokens)]
        return (*opens, *closes, *calls, *layout.dropped, *layout.transparent)

    def end_of_reasoning(self, spec: OutputSpec) -> str:
        """The text between reasoning and the requested output; empty if nothing ends reasoning."""
        return self.overrides.end_of_reasoning(spec) if self.overrides else self.answer_prefix

    def grammar_after_reasoning(self, spec: OutputSpec, *, constrains: bool) -> str | None:
        overrides = self.overrides
        return overrides.grammar_after_reasoning(spec, constrains) if overrides else None

    def thinks(self, checkpoint: Checkpoint) -> bool:
        """Whether the model may reason: its template or vocabulary has the delimiters."""
        opens, _ = self.thinking_delimiters()
        return any(_knows(checkpoint, delimiter) for delimiter in opens)

    def render(
        self, checkpoint: Checkpoint, conversation: Conversation, most: int | None = None
    ) -> RenderedPrompt:
        """Render and tokenise; a prompt of over `most` tokens is refused before the end."""
        if self.renderer:
            if most is not None:
                _check_contents(checkpoint, conversation, most)
            return self.renderer(checkpoint, conversation)
        options = RenderOptions(
            dict(self.roles),
            self.call_id,
            self.write_calls,
            self.tools_in_prompt,
            self._reasoning_text(checkpoint),
        )
        return render_prompt(checkpoint, conversation, options, most)

    def with_tools_in_prompt(self) -> "ModelFamily":
        """The family with its tools described as Hermes models are given them. Calls in Hermes'
        format are read in addition to its own."""

        def layout(tools: Sequence[Tool]) -> MarkupLayout:
            own = self.layout if isinstance(self.layout, MarkupLayout) else self.layout(tools)
            others = (each for each in own.call_formats if each != HERMES)
            return replace(own, call_formats=(HERMES, *others)) if tools else own

        return replace(self, layout=layout, write_calls=in_hermes_tags, tools_in_prompt=True)

    def reasoning_pairs(self, checkpoint: Checkpoint) -> tuple[tuple[str, str], ...]:
        """The opening and closing delimiters of reasoning that the model knows."""
        if self.overrides:
            return ()
        pairs = self.layout_with().reasoning
        return tuple(pair for pair in pairs if _knows(checkpoint, pair[0]))

    def reasons(self, checkpoint: Checkpoint) -> bool:
        """Whether an answer may begin with reasoning that a client sends."""
        return bool(self.overrides or self.reasoning_pairs(checkpoint))

    def open_end(self, checkpoint: Checkpoint, begun: Message) -> str:
        """The delimiter of the section in which a prompt ends whose last message is continued; ""
        for the text of an answer that has none."""
        if self.overrides:
            return self.overrides.opening(begun)
        if begun.content or not begun.reasoning:
            return ""
        return self.reasoning_pairs(checkpoint)[0][0]

    def _reasoning_text(self, checkpoint: Checkpoint) -> ReasoningText | None:
        for opening, closing in self.reasoning_pairs(checkpoint):
            return ReasoningText(f"{opening}\n", self.answer_prefix or f"\n{closing}\n\n")
        return None


def _knows(checkpoint: Checkpoint, delimiter: str) -> bool:
    control = checkpoint.tokenizer.control_tokens.values()
    in_template = delimiter.strip() in checkpoint.template_source
    return in_template or any(token in delimiter for token in control)


def _check_contents(checkpoint: Checkpoint, conversation: Conversation, most: int) -> None:
    """Refuse a prompt that is too long for a renderer that tokenises all of it at once. Only
    suspects are counted: ordinary text has fewer than 8 characters per token."""
    contents = [message.content for message in conversation.messages]
    if sum(map(len, contents)) > 8 * most:
        found = 0
        for content in contents:
            found += len(checkpoint.tokenizer.encode_within(content, most, found))
