"""The grammar of arguments that are written one by one, in the order of the tool's schema."""

from collections.abc import Callable, Sequence

from mlx_server.errors import BadRequest
from mlx_server.grammars.lark import Lark
from mlx_server.schemas.values import MemberSchema


class UncallableTool(BadRequest):
    """A tool that can't be called in a call format."""

    def __init__(self, what: str) -> None:
        super().__init__(f"This model has no way to write {what}.", param="tools")


ParameterWriter = Callable[[MemberSchema], str | None]
"""Returns a parameter as symbols of a rule; None if the format can't express its key."""

ParameterRules = tuple[str, bool]
"""The rule of a parameter, and whether it is required."""


ParameterVariants = Sequence[Sequence[MemberSchema]]
"""Alternative lists of members; the arguments have those of one list."""


def one_by_one_rule(variants: ParameterVariants, write: ParameterWriter, lark: Lark) -> str:
    def in_turn(found: Sequence[MemberSchema]) -> str:
        texts = (text if required else f"({text})?" for text, required in _all(found, write))
        return " ".join(texts) or '""'

    return _any([in_turn(found) for found in variants], lark)


def comma_separated_rule(
    variants: ParameterVariants, write: ParameterWriter, lark: Lark, comma: str
) -> str:
    """comma: what separates two parameters, as symbols of a rule."""
    return _any([_parted(found, write, lark, comma) for found in variants], lark)


def _parted(found: Sequence[MemberSchema], write: ParameterWriter, lark: Lark, comma: str) -> str:
    written = _all(found, write)
    rest, options = "", []
    for text, required in reversed(written):
        options.append(f"{text} {rest}")
        if required:
            options = options[-1:]
        more = f"{comma} {text}" if required else f"({comma} {text})?"
        rest = lark.rule(f"{more} {rest}")
    options = options[::-1]
    if not any(required for _, required in written):
        return lark.rule(" | ".join([*options, '""']))
    return lark.rule(" | ".join(options))


def _any(written: Sequence[str], lark: Lark) -> str:
    if not written:
        raise UncallableTool("arguments that the tool's schema allows")
    return lark.rule(" | ".join(written))


def _all(found: Sequence[MemberSchema], write: ParameterWriter) -> list[ParameterRules]:
    written: list[ParameterRules] = []
    for member in found:
        text = write(member)
        if text is not None:
            written.append((text, member.required))
        elif member.required:
            raise UncallableTool(f"a parameter called {member.key!r}")
    return written
