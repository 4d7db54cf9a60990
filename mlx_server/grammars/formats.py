"""The answer formats that a client may request, as rules of a grammar."""

from mlx_server import limits
from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import schema, user_grammar
from mlx_server.grammars.lark import Lark, quoted
from mlx_server.requests import ChoiceFormat, Format, GrammarFormat, JsonFormat, RegexFormat
from mlx_server.schemas import patterns
from mlx_server.schemas.compiled import compiled


def format_rule(format: Format, lark: Lark) -> str:
    """Returns the rule of an answer in this format, with nothing before or after it."""
    match format:
        case JsonFormat(schema=found):
            return lark.schema(compiled(found).grammar)
        case RegexFormat(pattern):
            return lark.terminal(patterns.terminal_of(patterns.unanchored(pattern)))
        case ChoiceFormat(options):
            return lark.terminal(" | ".join(map(quoted, dict.fromkeys(options))))
        case GrammarFormat(source):
            return lark.rule(user_grammar.user_grammar_body(source))


def is_verbatim(format: Format | None) -> bool:
    """Whether white space at the beginning of an answer may belong to the format."""
    return format is not None and not isinstance(format, JsonFormat)


def check(format: Format, param: str) -> None:
    """Raises InvalidGrammar if the format can't be used."""
    try:
        match format:
            case JsonFormat(schema=found, strict=strict):
                schema.check(found, strict=strict)
            case RegexFormat(pattern):
                _check_pattern(pattern)
            case ChoiceFormat(options):
                _check_options(options)
            case GrammarFormat(source):
                _check_text(source)
                user_grammar.user_grammar_body(source)
    except InvalidGrammar as error:
        error.param = param
        raise


def unenforced(format: Format) -> tuple[str, ...]:
    """`keyword at #/path` for each keyword that the grammar leaves out."""
    if isinstance(format, JsonFormat) and not format.strict:
        return schema.unenforced(format.schema)
    return ()


def _check_pattern(pattern: str) -> None:
    _check_text(pattern)
    if why := patterns.unsupported(pattern):
        raise InvalidGrammar(f"The pattern has {why}, which a grammar can't express. Leave it out.")
    if why := patterns.excessive_part(pattern):
        raise InvalidGrammar(f"The pattern {why}. Use a shorter one.")


def _check_options(options: tuple[str, ...]) -> None:
    if not options or "" in options:
        raise InvalidGrammar(
            "The choice has no options, or an empty one. Give every option some text."
        )
    if len(options) > limits.CHOICES:
        raise InvalidGrammar(
            f"The choice has {len(options)} options, more than {limits.CHOICES}. Send fewer."
        )
    text = "".join(options)
    _check_text(text)
    if len(text) > limits.CHOICE_CHARACTERS:
        raise InvalidGrammar(
            f"The options have {len(text)} characters, more than {limits.CHOICE_CHARACTERS}. "
            "Send fewer, or shorter ones."
        )


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidGrammar(
            "A pattern or an option has half of a surrogate pair. Send the whole character."
        ) from None
