"""The record of a model family, with the defaults that most families share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import tokenizers

from mlx_server.checkpoints.checkpoint import Checkpoint
from mlx_server.engine.messages import Grammar
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

GrammarAfterReasoning = Callable[[OutputSpec, bool], Grammar | None]

Delimiters = tuple[tuple[str, ...], tuple[str, ...]]
"""The opening delimiters and the closing delimiters, any two of which may be paired."""


@dataclass(frozen=True)
class FamilyOverrides:
    """Parsing and constraints of a family whose format no `MarkupLayout` can describe."""

    parser: Callable[[ParseContext], Parser]
    write: Callable[[Message], str]
    """Returns the raw output of an answer, as the model writes it."""
    grammar: Callable[[OutputSpec], Grammar | None] = lambda spec: None
    thinking_delimiters: Delimiters = ((), ())
    end_of_reasoning: Callable[[OutputSpec], str] = lambda spec: ""
    """Returns the text that ends reasoning and leads to the requested output."""
    opening: Callable[[Message], str] = lambda begun: ""
    """Returns the delimiter before the text of a message that the answer continues."""
    grammar_after_reasoning: GrammarAfterReasoning = lambda spec, constrains: None
    """Returns the grammar of the answer after reasoning that its budget has ended, if that differs
    from the rest of the answer's grammar. constrains: whether calls must follow their schemas."""


@dataclass(frozen=True)
class ModelFamily:
    name: str
    layout: MarkupLayout | Callable[[Sequence[Tool]], MarkupLayout] = TEXT
    """The parts of an answer and their delimiters, which depend on the tools in some families."""
    overrides: FamilyOverrides | None = None
    """The parser and grammars of a family whose format is not in `layout`."""
    model_types: tuple[str, ...] = ()
    """`model_type` values of config.json; empty if `template_markers` identify the family alone."""
    template_markers: tuple[str, ...] = ()
    """Texts that the chat template must contain, if the model type alone is ambiguous."""
    stop_tokens: tuple[str, ...] = ()
    """Stop tokens in addition to the checkpoint's own. Those not in the vocabulary are ignored."""
    shapes: tuple[str, str] = ("", "")
    """The formats of reasoning and of calls that the table of families shows, for a family whose
    layout can't show them."""
    special_tokens: tuple[str, ...] = ()
    """The special tokens in the vocabulary of a replay model that has no tokenizer.json."""
    replay_tokenizer: Callable[[], tokenizers.Tokenizer] | None = None
    """Makes the tokenizer of replay models, if bytes and special tokens are not enough."""
    renderer: Renderer | None = None
    """Renders the prompts of a family for which chat templates do not suffice."""
    answer_prefix: str = ""
    """The text that leads from reasoning to the answer, to continue an answer that stopped between
    them. It is empty for a family whose answers are never continued in this way."""
    roles: tuple[tuple[str, str], ...] = (("developer", "system"),)
    """Pairs of a role and the name that it has in this family's templates."""
    call_id: CallId = as_given
    """Converts the ids of earlier calls, which another model or a client may have made, to ids that
    this family's templates accept."""
    reasoning_tags: tuple[Pair, ...] | None = None
    """Tags of reasoning that models.yaml adds to the family's own. None: tags that models of any
    family may write are recognised at the beginning of an answer, and reported as a repair."""
    write_calls: WriteCalls = in_hermes_tags
    """Renders earlier calls as the model writes them, for templates that can't."""
    tools_in_prompt: bool = False
    """Whether tools are described in the system prompt: see `with_tools_in_prompt`."""

    def evidence(self, checkpoint: Checkpoint) -> int:
        """Rates how well the checkpoint matches: 1 by its model type, 2 by its template, 3 by both.
        It is 0 if one of the family's conditions fails, or if the family has none."""
        source = checkpoint.template_source
        if self.model_types and checkpoint.model_type not in self.model_types:
            return 0
        if not self.is_marked(source):
            return 0
        return bool(self.model_types) + 2 * bool(self.template_markers)

    def is_marked(self, template: str) -> bool:
        """Whether the template contains all texts that it must contain."""
        return all(marker in template for marker in self.template_markers)

    def stops(self, checkpoint: Checkpoint) -> frozenset[int]:
        own = (checkpoint.tokenizer.id_of(token) for token in self.stop_tokens)
        return checkpoint.end_tokens | {token for token in own if token is not None}

    def layout_with(self, tools: Sequence[Tool] = ()) -> MarkupLayout:
        layout = self.layout if isinstance(self.layout, MarkupLayout) else self.layout(tools)
        layout = layout.with_reasoning(self.reasoning_tags or ())
        after_reasoning = self._after_reasoning(layout)
        return replace(layout, after_reasoning=after_reasoning, stops=self.stop_tokens)

    def _after_reasoning(self, layout: MarkupLayout) -> str:
        """The white space that the model writes after its reasoning, taken from the answer
        prefix."""
        trims = layout.trims and layout.trims_text
        return self.answer_prefix[len(self.answer_prefix.rstrip()) :] if trims else ""

    def make_parser(self, context: ParseContext) -> Parser:
        if self.reasoning_tags is not None:
            context = replace(context, reasoning_tags=self.reasoning_tags)
        if self.overrides:
            return self.overrides.parser(context)
        return MarkupParser(self.layout_with(context.tools), context)

    def grammar(self, spec: OutputSpec) -> Grammar | None:
        """The Lark grammar of the whole answer; None if any text is valid."""
        if self.overrides:
            return self.overrides.grammar(spec)
        return markup_grammar(self.layout_with(spec.context.tools), spec, self.stop_tokens)

    def unsupported_keywords(self, tool: Tool) -> tuple[str, ...]:
        """The schema keywords, each as `keyword at #/path`, that the grammar of a tool without
        `strict` does not enforce."""
        return unsupported_keywords(
            () if self.overrides else self.layout_with((tool,)).call_formats, tool
        )

    def thinking_delimiters(self) -> Delimiters:
        """The delimiters that open reasoning and those that close it."""
        if self.overrides:
            return self.overrides.thinking_delimiters
        layout = self.layout_with()
        return layout.opens_reasoning, layout.ends_of_reasoning

    def call_delimiters(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """The delimiters that open a call within the text of an answer."""
        return () if self.overrides else self.layout_with(tools).calls

    def invisible_delimiters(self) -> tuple[str, ...]:
        """The delimiters that are neither part of any text nor reported by an event."""
        opens, closes = self.thinking_delimiters()
        if self.overrides:
            return (*opens, *closes)
        layout = self.layout_with()
        ends = [delimiter for each in layout.call_formats for delimiter in each.closes]
        calls = [delimiter for delimiter in ends if delimiter.startswith(self.special_tokens)]
        return (*opens, *closes, *calls, *layout.dropped, *layout.transparent)

    def end_of_reasoning(self, spec: OutputSpec) -> str:
        """The text that ends reasoning and leads to the requested output; empty if there is
        none."""
        return self.overrides.end_of_reasoning(spec) if self.overrides else self.answer_prefix

    def grammar_after_reasoning(self, spec: OutputSpec, *, constrains: bool) -> Grammar | None:
        overrides = self.overrides
        return overrides.grammar_after_reasoning(spec, constrains) if overrides else None

    def thinks(self, checkpoint: Checkpoint) -> bool:
        """Whether the model may reason, since its template or vocabulary has the delimiters."""
        opens, _ = self.thinking_delimiters()
        return any(_knows(checkpoint, delimiter) for delimiter in opens)

    def render(
        self, checkpoint: Checkpoint, conversation: Conversation, most: int | None = None
    ) -> RenderedPrompt:
        """Renders and tokenises a conversation. Raises ContextTooLong, before it is complete, for a
        prompt of more than `most` tokens."""
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
        """The family with tools described in the system prompt, as for Hermes models. Calls in
        Hermes' format are parsed in addition to those in the family's own."""

        def layout(tools: Sequence[Tool]) -> MarkupLayout:
            own = self.layout if isinstance(self.layout, MarkupLayout) else self.layout(tools)
            others = (each for each in own.call_formats if each != HERMES)
            return replace(own, call_formats=(HERMES, *others)) if tools else own

        return replace(self, layout=layout, write_calls=in_hermes_tags, tools_in_prompt=True)

    def reasoning_pairs(self, checkpoint: Checkpoint) -> tuple[tuple[str, str], ...]:
        """The pairs of reasoning delimiters that the checkpoint's template or vocabulary has."""
        if self.overrides:
            return ()
        pairs = self.layout_with().reasoning
        return tuple(pair for pair in pairs if _knows(checkpoint, pair[0]))

    def reasons(self, checkpoint: Checkpoint) -> bool:
        """Whether an answer may continue reasoning that the client sends."""
        return bool(self.overrides or self.reasoning_pairs(checkpoint))

    def open_end(self, checkpoint: Checkpoint, begun: Message) -> str:
        """The delimiter that opened the section in which a continued message ends; "" if it ends in
        text without a delimiter."""
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
    """Raises ContextTooLong for a conversation of more than `most` tokens, since a renderer of its
    own tokenises everything at once. Tokens are counted only if there are more than 8 characters
    for each, which is rare for ordinary text."""
    contents = [message.content for message in conversation.messages]
    if sum(map(len, contents)) > 8 * most:
        found = 0
        for content in contents:
            found += len(checkpoint.tokenizer.encode_within(content, most, found))
