"""gpt-oss: Harmony, rendered and parsed with openai-harmony."""

from mlx_server.families.base import FamilyOverrides, ModelFamily
from mlx_server.parsers.harmony.grammar import (
    FINAL,
    NEXT,
    REASONING,
    end_of_reasoning,
    grammar,
    grammar_after_reasoning,
)
from mlx_server.parsers.harmony.output import harmony_output
from mlx_server.parsers.harmony.parser import HarmonyParser
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.prompts.harmony import prompt as harmony_prompt
from mlx_server.prompts.harmony.vocabulary import SPECIAL, encoding, replay_tokenizer

DELIMITERS = ((REASONING,), ("<|end|>", "<|start|>"))
"""The delimiters of reasoning. `<|start|>` closes it too, since models may start the next message
without ending the last one."""


def _parser(context: ParseContext) -> HarmonyParser:
    return HarmonyParser(encoding(), context)


GPT_OSS = ModelFamily(
    name="gpt_oss",
    overrides=FamilyOverrides(
        _parser,
        harmony_output,
        grammar,
        DELIMITERS,
        end_of_reasoning,
        harmony_prompt.opening,
        grammar_after_reasoning,
    ),
    shapes=("analysis", "commentary to=functions.…"),
    renderer=harmony_prompt.render,
    model_types=("gpt_oss",),
    stop_tokens=("<|return|>", "<|call|>", "<|endoftext|>"),
    special_tokens=SPECIAL,
    replay_tokenizer=replay_tokenizer,
    answer_prefix=NEXT + FINAL,
)
