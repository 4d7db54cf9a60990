"""gpt-oss on another server: Harmony as text, with its control tokens spelled out or dropped.

Only `family:` in models.yaml or `AS_TEXT` chooses this family, never a checkpoint.
"""

from mlx_server.engine.messages import Grammar
from mlx_server.families.base import FamilyOverrides, ModelFamily
from mlx_server.grammars.formats import format_rule
from mlx_server.grammars.lark import Lark
from mlx_server.parsers.harmony.output import harmony_output
from mlx_server.parsers.harmony.text_parser import HarmonyTextParser
from mlx_server.parsers.output_spec import OutputSpec
from mlx_server.parsers.parse_context import ParseContext, Parser
from mlx_server.parsers.text import TextParser
from mlx_server.prompts.harmony.vocabulary import encoding


def _parser(context: ParseContext) -> Parser:
    return TextParser(context) if context.formatted else HarmonyTextParser(encoding(), context)


def _grammar(spec: OutputSpec) -> Grammar | None:
    """The grammar of a required format, which is then the whole answer; None without a format,
    since calls are not constrained."""
    if spec.format is None:
        return None
    lark = Lark(spec.context.control)
    return lark.source(format_rule(spec.format, lark))


HARMONY_TEXT = ModelFamily(
    name="harmony_text",
    overrides=FamilyOverrides(_parser, harmony_output, _grammar),
    shapes=("analysis", "commentary to=functions.…"),
)
