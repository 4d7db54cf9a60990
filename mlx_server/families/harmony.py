"""gpt-oss: Harmony, rendered and parsed with openai-harmony; on another server, Harmony as text."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import tokenizers

from mlx_server.engine.messages import Grammar
from mlx_server.families.base import Delimiters, ModelFamily
from mlx_server.grammars.formats import format_rule
from mlx_server.grammars.lark import Lark
from mlx_server.messages import Conversation, Message
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.parsers import harmony_grammar
from mlx_server.parsers.harmony_grammar import FINAL, NEXT, REASONING, harmony_output
from mlx_server.parsers.harmony_parser import HarmonyParser
from mlx_server.parsers.harmony_text import HarmonyTextParser
from mlx_server.parsers.parse_context import OutputSpec, ParseContext, Parser, TextParser
from mlx_server.prompts.harmony import prompt as harmony_prompt
from mlx_server.prompts.harmony.vocabulary import SPECIAL, encoding, replay_tokenizer
from mlx_server.prompts.template_prompt import RenderedPrompt


@dataclass(frozen=True)
class HarmonyFamily(ModelFamily):
    shapes: tuple[str, str] = field(default=("analysis", "commentary to=functions.…"), kw_only=True)
    has_calls = True

    def make_parser(self, context: ParseContext) -> Parser:
        return HarmonyParser(encoding(), context)

    def grammar(self, spec: OutputSpec) -> Grammar | None:
        return harmony_grammar.grammar(spec)

    def thinking_delimiters(self) -> Delimiters:
        # models may start the next message without ending the last one
        return (REASONING,), ("<|end|>", "<|start|>")

    def end_of_reasoning(self, spec: OutputSpec) -> str:
        return harmony_grammar.end_of_reasoning(spec)

    def grammar_after_reasoning(self, spec: OutputSpec, *, constrains: bool) -> Grammar | None:
        return harmony_grammar.grammar_after_reasoning(spec, constrains)

    def reasons(self, checkpoint: Checkpoint) -> bool:
        return True

    def open_end(self, checkpoint: Checkpoint, begun: Message) -> str:
        return harmony_prompt.opening(begun)

    def outputs(self, answer: Message) -> Iterator[str]:
        yield harmony_output(answer)

    def replay_tokenizer(self) -> tokenizers.Tokenizer | None:
        return replay_tokenizer()

    def render(
        self, checkpoint: Checkpoint, conversation: Conversation, most: int | None = None
    ) -> RenderedPrompt:
        if most is not None:
            _check_contents(checkpoint, conversation, most)
        return harmony_prompt.render(checkpoint, conversation)


class HarmonyTextFamily(ModelFamily):
    """Harmony with its control tokens spelled out or dropped, or with a vocabulary that is not
    gpt-oss's, as LLM-jp-4's: such a checkpoint has a chat template of its own."""

    has_calls = True

    def make_parser(self, context: ParseContext) -> Parser:
        if context.formatted:
            return TextParser(context)
        return HarmonyTextParser(encoding(), context)

    def grammar(self, spec: OutputSpec) -> Grammar | None:
        """Returns the grammar of a required format, which is then the whole answer; None without a
        format, since calls are not constrained."""
        if spec.format is None:
            return None
        lark = Lark(spec.context.control)
        return lark.source(format_rule(spec.format, lark))

    def reasons(self, checkpoint: Checkpoint) -> bool:
        return True

    def outputs(self, answer: Message) -> Iterator[str]:
        yield harmony_output(answer)


def _check_contents(checkpoint: Checkpoint, conversation: Conversation, most: int) -> None:
    """Raises ContextTooLong for a conversation of more than `most` tokens, since a renderer of its
    own tokenises everything at once. Tokens are counted only if there are more than 8 characters
    for each, which is rare for ordinary text."""
    contents = [message.content for message in conversation.messages]
    if sum(map(len, contents)) > 8 * most:
        found = 0
        for content in contents:
            found += len(checkpoint.tokenizer.encode_within(content, most, found))


GPT_OSS = HarmonyFamily(
    "gpt_oss",
    model_types=("gpt_oss",),
    stop_tokens=("<|return|>", "<|call|>", "<|endoftext|>"),
    special_tokens=SPECIAL,
    answer_prefix=NEXT + FINAL,
)
HARMONY_TEXT = HarmonyTextFamily(
    "harmony_text",
    model_types=("llama", "qwen3_moe"),
    template_markers=("<|start|>assistant", "<|channel|>analysis<|message|>"),
    special_tokens=SPECIAL,
    shapes=GPT_OSS.shapes,
)
