"""What differs by model family, and what most of them share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import tokenizers

from mlx_server.checkpoints.checkpoint import Checkpoint
from mlx_server.messages import Conversation, Tool
from mlx_server.parsers.markup import MarkupLayout, MarkupParser
from mlx_server.parsers.markup_grammar import markup_grammar
from mlx_server.parsers.output_spec import OutputSpec
from mlx_server.parsers.parse_context import ParseContext, Parser
from mlx_server.prompts.history_rendering import WriteCalls, in_hermes_tags
from mlx_server.prompts.message_normalization import CallId
from mlx_server.prompts.template_prompt import (
    RenderedPrompt,
    RenderOptions,
    as_given,
    render_prompt,
)
from mlx_server.tool_parsers.blocks import unsupported_keywords

__all__ = ["FamilyOverrides", "ModelFamily", "RenderedPrompt"]


Renderer = Callable[[Checkpoint, Conversation], RenderedPrompt]


TEXT = MarkupLayout(reasoning=())

Delimiters = tuple[tuple[str, ...], tuple[str, ...]]
"""Those that open something, and those that close it."""


@dataclass(frozen=True)
class FamilyOverrides:
    """How answers are read and constrained that no layout of marks can tell of."""

    parser: Callable[[ParseContext], Parser]
    grammar: Callable[[OutputSpec], str | None] = lambda wanted: None
    thinking_delimiters: Delimiters = ((), ())
    end_of_reasoning: Callable[[OutputSpec], str] = lambda wanted: ""
    """What leads from it to what is wanted."""


@dataclass(frozen=True)
class ModelFamily:
    name: str
    layout: MarkupLayout | Callable[[Sequence[Tool]], MarkupLayout] = TEXT
    """What answers are made of, for some families only with the tools in view."""
    overrides: FamilyOverrides | None = None
    model_types: tuple[str, ...] = ()
    """Left out where the template's marks tell, whatever the type."""
    template_markers: tuple[str, ...] = ()
    """Texts that the chat template must contain, where the model type alone does not tell."""
    stop_tokens: tuple[str, ...] = ()
    """Beside those that the checkpoint names itself; by spelling, absent ones are passed over."""
    shapes: tuple[str, str] = ("", "")
    """Of reasoning and of calls, in the table of families, where no layout of marks tells."""
    special_tokens: tuple[str, ...] = ()
    """Of the family's vocabularies, for models that are replayed without one."""
    real_tokenizer: Callable[[], tokenizers.Tokenizer] | None = None
    """For the same, where bytes and special tokens are not enough."""
    renderer: Renderer | None = None
    """Makes the prompts of a family that no chat template can."""
    answer_prefix: str = ""
    """What leads a model on that stopped after its reasoning and has not answered."""
    roles: tuple[tuple[str, str], ...] = (("developer", "system"),)
    """Roles that the templates of this family know by another name."""
    call_id: CallId = as_given
    """The ids of earlier calls, where another model or a client made them."""
    write_calls: WriteCalls = in_hermes_tags
    """Earlier calls as the model wrote them, for templates that leave them out."""

    def evidence(self, checkpoint: Checkpoint) -> int:
        """How much speaks for this family: 1 the model's type, 2 what its template shows, 3 both.

        0 if a thing that the family asks for is missing, or if it asks for nothing.
        """
        source = checkpoint.template_source
        if self.model_types and checkpoint.model_type not in self.model_types:
            return 0
        if not all(mark in source for mark in self.template_markers):
            return 0
        return bool(self.model_types) + 2 * bool(self.template_markers)

    def stops(self, checkpoint: Checkpoint) -> frozenset[int]:
        own = (checkpoint.tokenizer.id_of(token) for token in self.stop_tokens)
        return checkpoint.end_tokens | {token for token in own if token is not None}

    def layout_with(self, tools: Sequence[Tool] = ()) -> MarkupLayout:
        layout = self.layout if isinstance(self.layout, MarkupLayout) else self.layout(tools)
        return replace(layout, after_reasoning=self._after_reasoning(layout))

    def _after_reasoning(self, layout: MarkupLayout) -> str:
        """As the bridge shows that models of this family write it."""
        trims = layout.trims and layout.trims_text
        return self.answer_prefix[len(self.answer_prefix.rstrip()) :] if trims else ""

    def make_parser(self, context: ParseContext) -> Parser:
        if self.overrides:
            return self.overrides.parser(context)
        return MarkupParser(self.layout_with(context.tools), context)

    def grammar(self, spec: OutputSpec) -> str | None:
        """Of a whole answer, in Lark; None if it may be anything."""
        if self.overrides:
            return self.overrides.grammar(spec)
        return markup_grammar(self.layout_with(spec.context.tools), spec)

    def unsupported_keywords(self, tool: Tool) -> tuple[str, ...]:
        """`keyword at #/path` for all that its calls are not held to, if it is not strict."""
        return unsupported_keywords(
            () if self.overrides else self.layout_with((tool,)).call_formats, tool
        )

    def thinking_delimiters(self) -> Delimiters:
        """Reasoning stands between any of the first and any of the others."""
        if self.overrides:
            return self.overrides.thinking_delimiters
        layout = self.layout_with()
        return layout.opens_reasoning, layout.ends_of_reasoning

    def call_delimiters(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Those that open calls in the text of an answer."""
        return () if self.overrides else self.layout_with(tools).calls

    def invisible_delimiters(self) -> tuple[str, ...]:
        """Those that are no text, and that nothing is told of."""
        opens, closes = self.thinking_delimiters()
        return (*opens, *closes, *(() if self.overrides else self.layout_with().dropped))

    def end_of_reasoning(self, spec: OutputSpec) -> str:
        """What leads from reasoning to what is wanted; empty where nothing ends it."""
        return self.overrides.end_of_reasoning(spec) if self.overrides else self.answer_prefix

    def thinks(self, checkpoint: Checkpoint) -> bool:
        """Whether the model may have been taught to: its vocabulary or its template knows how."""
        opens, _ = self.thinking_delimiters()
        control = checkpoint.tokenizer.control_tokens.values()
        return any(
            mark.strip() in checkpoint.template_source or any(token in mark for token in control)
            for mark in opens
        )

    def render(
        self, checkpoint: Checkpoint, conversation: Conversation, most: int | None = None
    ) -> RenderedPrompt:
        """most: tokens beyond which the prompt is refused before all of it is tokenised."""
        if self.renderer:
            if most is not None:
                _check_contents(checkpoint, conversation, most)
            return self.renderer(checkpoint, conversation)
        wording = RenderOptions(dict(self.roles), self.call_id, self.write_calls)
        return render_prompt(checkpoint, conversation, wording, most)


def _check_contents(checkpoint: Checkpoint, conversation: Conversation, most: int) -> None:
    """For a library that tokenises all of a prompt at once. Only what is likely to be too long is
    looked at: real text has fewer characters a token."""
    contents = [message.content for message in conversation.messages]
    if sum(map(len, contents)) > 8 * most:
        found = 0
        for content in contents:
            found += len(checkpoint.tokenizer.encode_within(content, most, found))
