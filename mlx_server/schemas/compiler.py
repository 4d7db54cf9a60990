"""Runs llguidance with the limits that the engine and the compiler process share."""

import re

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mlx_server import limits

LIMITS = LLParserLimits(
    max_items_in_row=limits.GRAMMAR_ITEMS_IN_ROW,
    initial_lexer_fuel=limits.GRAMMAR_FIRST_STEPS,
    step_lexer_fuel=limits.GRAMMAR_STEPS,
    step_max_items=limits.GRAMMAR_STEP_ITEMS,
    max_lexer_states=limits.GRAMMAR_STATES,
    max_grammar_size=limits.GRAMMAR_SIZE,
    verbose_errors=False,
)

STACK_BYTES = 256 << 20
"""Of a thread that compiles: enough for as many rules as limits.WHOLE_GRAMMAR_RULES."""


class _Bytes:
    """A vocabulary of single bytes, which can spell any text."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<|end|>")
    special_token_ids = (eos_token_id,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


BYTES = LLTokenizer(
    llguidance.TokenizerWrapper(_Bytes()), n_vocab=257, eos_token=_Bytes.eos_token_id, slices=[]
)


def fault(source: str, *, reads_only: bool = False) -> str:
    """Returns why a grammar can't be used; empty if it can be.

    reads_only: whether only its rules are compiled, and its lexer is left to the engine.
    """
    if reads_only:
        return in_a_line(LLMatcher.validate_grammar(source, None, limits=LIMITS))
    matcher = LLMatcher(BYTES, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some faults appear only now
    return in_a_line(matcher.get_error()) if matcher.is_error() else ""


def text_fault(source: str) -> str:
    """Returns why the lexer of a JSON text fails within its first characters; empty if it does
    not."""
    matcher = LLMatcher(BYTES, source, log_level=0, limits=LIMITS)
    for characters in (b'"', *[_FIRST] * 2):
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        allowed = (byte for byte in characters if mask and mask[byte >> 3] >> (byte & 7) & 1)
        if (byte := next(allowed, None)) is None:
            break
        matcher.consume_token(byte)
    else:
        matcher.compute_bitmask()
    return in_a_line(matcher.get_error()) if matcher.is_error() else ""


_FIRST = b"a0A-_ .@/zZ9"


def in_a_line(message: str) -> str:
    """Returns llguidance's message on one line, without its state, its listings and the names of
    rules."""
    text = re.split(r"<state>|<grammar>|<non-verbose/>|\n +\d+ \| ", message)[0]
    text = re.sub(r"^\s*(at )?\d+\(\d+\): ", "", text)
    before, listing, after = text.partition("regex parse error:")
    if listing and "\nerror: " in after:
        text = before + after.partition("\nerror: ")[2]
    text = re.sub(r" \(in \w+\)|json-schema:///", "", text)
    text = " ".join(text.replace("NoExtensionBias", "no answer can match it").split())
    return (
        text
        if len(text) <= limits.QUOTED_ERROR_CHARACTERS
        else f"{text[: limits.QUOTED_ERROR_CHARACTERS]} ..."
    )
