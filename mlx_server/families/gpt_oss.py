"""gpt-oss: Harmony, written and read by openai-harmony."""

from mlx_server.families.base import ModelFamily, Own
from mlx_server.parsers.harmony import HarmonyParser
from mlx_server.parsers.harmony_grammar import FINAL, NEXT, REASONING, end_of_reasoning, grammar
from mlx_server.parsers.parse_context import Reading
from mlx_server.prompts import harmony_prompt
from mlx_server.prompts.harmony_vocabulary import SPECIAL, encoding, real_tokenizer

MARKS = ((REASONING,), ("<|end|>", "<|start|>"))
"""Of reasoning; some begin the next message without ending it."""


def _parser(reading: Reading) -> HarmonyParser:
    return HarmonyParser(encoding(), reading)


GPT_OSS = ModelFamily(
    name="gpt_oss",
    own=Own(_parser, grammar, MARKS, end_of_reasoning),
    shapes=("analysis", "commentary to=functions.…"),
    renderer=harmony_prompt.render,
    model_types=("gpt_oss",),
    stop_tokens=("<|return|>", "<|call|>", "<|endoftext|>"),
    special_tokens=SPECIAL,
    real_tokenizer=real_tokenizer,
    bridge=NEXT + FINAL,
)
