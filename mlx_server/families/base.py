"""The protocol of a model family: how prompts are written, and how answers are read."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import tokenizers

from mlx_server.engine.messages import Grammar
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.parsers.markup_layout import MarkupLayout
from mlx_server.parsers.parse_context import OutputSpec, ParseContext, Parser
from mlx_server.prompts.continuation import ReasoningText
from mlx_server.prompts.history_rendering import WriteCalls, in_hermes_tags
from mlx_server.prompts.message_normalization import CallId
from mlx_server.prompts.template_prompt import (
    RenderedPrompt,
    RenderOptions,
    as_given,
    render_prompt,
)
from mlx_server.tool_parsers.call_format import unsupported_keywords

Delimiters = tuple[tuple[str, ...], tuple[str, ...]]
"""The opening delimiters and the closing delimiters, any two of which may be paired."""

TEXT = MarkupLayout(reasoning=())


def spelled(tokens: str) -> tuple[str, ...]:
    """Returns the tokens that spaces separate in a text."""
    return tuple(tokens.split())


@dataclass(frozen=True)
class ModelFamily(ABC):
    name: str
    _: KW_ONLY
    model_types: tuple[str, ...] = ()
    """`model_type` values of config.json; empty if `template_markers` identify the family alone."""
    template_markers: tuple[str, ...] = ()
    """Texts that the chat template must contain, if the model type alone is ambiguous."""
    stop_tokens: tuple[str, ...] = ()
    """Stop tokens in addition to the checkpoint's own. Those not in the vocabulary are ignored."""
    special_tokens: tuple[str, ...] = ()
    """The special tokens in the vocabulary of a replay model that has no tokenizer.json."""
    shapes: tuple[str, str] = ("", "")
    """The formats of reasoning and of calls that the table of families shows, for a family whose
    layout can't show them."""
    answer_prefix: str = ""
    """The text that leads from reasoning to the answer, to continue an answer that stopped between
    them. It is empty for a family whose answers are never continued in this way."""
    roles: tuple[tuple[str, str], ...] = (("developer", "system"),)
    """Pairs of a role and the name that it has in this family's templates."""
    call_id: CallId = as_given
    """Converts the ids of earlier calls, which another model or a client may have made, to ids that
    this family's templates accept."""
    write_calls: WriteCalls = in_hermes_tags
    """Renders earlier calls as the model writes them, for templates that can't."""
    tools_in_prompt: bool = False
    """Whether tools are described in the system prompt: see `MarkupFamily.with_tools_in_prompt`."""

    @abstractmethod
    def make_parser(self, context: ParseContext) -> Parser:
        """Returns the parser of one answer."""

    @abstractmethod
    def grammar(self, spec: OutputSpec) -> Grammar | None:
        """Returns the grammar of the whole answer; None if any text is valid."""

    def thinking_delimiters(self) -> Delimiters:
        """Returns the delimiters that open reasoning and those that close it."""
        return (), ()

    def end_of_reasoning(self, spec: OutputSpec) -> str:
        """Returns the text that ends reasoning and leads to the requested output; empty if there is
        none."""
        return ""

    @abstractmethod
    def reasons(self, checkpoint: Checkpoint) -> bool:
        """Whether an answer may continue reasoning that the client sends."""

    def open_end(self, checkpoint: Checkpoint, begun: Message) -> str:
        """Returns the delimiter that opened the section in which a continued message ends; "" if it
        ends in text without a delimiter."""
        return ""

    @abstractmethod
    def outputs(self, answer: Message) -> Iterator[str]:
        """Yields raw outputs that may be read as the answer, the likeliest first."""

    @property
    @abstractmethod
    def has_calls(self) -> bool:
        """Whether the family has a format for calls."""

    def grammar_after_reasoning(self, spec: OutputSpec, *, constrains: bool) -> Grammar | None:
        """Returns the grammar of the answer after reasoning that its budget has ended, if that
        differs from the rest of the answer's grammar. constrains: whether calls must follow their
        schemas."""
        return None

    def with_tools_in_prompt(self) -> "ModelFamily":
        """Returns the family with tools described in the system prompt, if it can be read so."""
        return self

    def layout_with(self, tools: Sequence[Tool] = ()) -> MarkupLayout:
        """Returns the parts of an answer that delimiters in its text separate."""
        return TEXT

    def replay_tokenizer(self) -> tokenizers.Tokenizer | None:
        """Makes the tokenizer of replay models, if bytes and special tokens are not enough."""
        return None

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

    def unsupported_keywords(self, tool: Tool) -> tuple[str, ...]:
        """The schema keywords, each as `keyword at #/path`, that the grammar of a tool without
        `strict` does not enforce."""
        return unsupported_keywords(self.layout_with((tool,)).call_formats, tool)

    def call_delimiters(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """The delimiters that open a call within the text of an answer."""
        return self.layout_with(tools).calls

    def thinks(self, checkpoint: Checkpoint) -> bool:
        """Whether the model may reason, since its template or vocabulary has the delimiters."""
        opens, _ = self.thinking_delimiters()
        return any(_knows(checkpoint, delimiter) for delimiter in opens)

    def render(
        self, checkpoint: Checkpoint, conversation: Conversation, most: int | None = None
    ) -> RenderedPrompt:
        """Renders and tokenises a conversation. Raises ContextTooLong, before it is complete, for a
        prompt of more than `most` tokens."""
        options = RenderOptions(
            dict(self.roles),
            self.call_id,
            self.write_calls,
            self.tools_in_prompt,
            self._reasoning_text(checkpoint),
        )
        return render_prompt(checkpoint, conversation, options, most)

    def reasoning_pairs(self, checkpoint: Checkpoint) -> tuple[tuple[str, str], ...]:
        """The pairs of reasoning delimiters that the checkpoint's template or vocabulary has."""
        pairs = self.layout_with().reasoning
        return tuple(pair for pair in pairs if _knows(checkpoint, pair[0]))

    def _reasoning_text(self, checkpoint: Checkpoint) -> ReasoningText | None:
        for opening, closing in self.reasoning_pairs(checkpoint):
            return ReasoningText(f"{opening}\n", self.answer_prefix or f"\n{closing}\n\n")
        return None


def _knows(checkpoint: Checkpoint, delimiter: str) -> bool:
    control = checkpoint.tokenizer.control_tokens.values()
    in_template = delimiter.strip() in checkpoint.template_source
    return in_template or any(token in delimiter for token in control)
