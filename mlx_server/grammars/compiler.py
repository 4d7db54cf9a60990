"""Runs llguidance with the limits that the engine and the compiler process share."""

import re
from collections.abc import Sequence

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mlx_server import limits
from mlx_server.errors import InvalidGrammar

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


END = 256
FIRST_CONTROL = END + 1


class _Bytes:
    """A vocabulary that spells any text byte by byte, and has these control tokens."""

    eos_token_id = END
    bos_token_id = None

    def __init__(self, control: Sequence[str] = ()) -> None:
        single = (bytes([byte]) for byte in range(END))
        self.tokens = (*single, b"<|end|>", *(token.encode() for token in control))
        self.special_token_ids = tuple(range(END, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def tokenizer(self) -> LLTokenizer:
        wrapped = llguidance.TokenizerWrapper(self)
        return LLTokenizer(wrapped, n_vocab=len(self.tokens), eos_token=END, slices=[])


BYTES = _Bytes().tokenizer()


def fault(source: str) -> str:
    """Returns why a grammar can't be used; empty if it can be."""
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


SPACE, AFTER_COMMA = ord(" "), b",:"
UNLIKELY = b" \t\r\n\\"
"""White space and escapes, which grammars allow and texts rarely need."""


def control_ids(control: Sequence[str]) -> dict[int, str]:
    """Returns the ids by which a grammar for `first_text` has to name these control tokens."""
    return dict(enumerate(control, FIRST_CONTROL))


def first_text(grammar: str, control: Sequence[str]) -> str:
    """Returns the text up to the first place where the grammar may end. Raises InvalidGrammar."""
    vocabulary = _Bytes(control)
    matcher = LLMatcher(vocabulary.tokenizer(), grammar, log_level=0, limits=LIMITS)
    ids: list[int] = []
    while not (matcher.is_error() or matcher.is_accepting() or matcher.is_stopped()):
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & ~(1 << END)
        if matcher.is_error():
            break
        ids.append(_plainest(mask, ids[-1] if ids else END))
        matcher.consume_token(ids[-1])
    if matcher.is_error():
        raise InvalidGrammar(in_a_line(matcher.get_error()))
    return b"".join(vocabulary.tokens[id] for id in ids).decode()


def _plainest(mask: int, last: int) -> int:
    """Returns a control token, which ends what could go on; else the first byte that is no white
    space, except for the space that models write after a comma or colon."""
    assert mask, "a grammar has no dead ends"
    if not mask & (mask - 1):
        return mask.bit_length() - 1
    allowed = [id for id in range(mask.bit_length()) if mask >> id & 1]
    if SPACE in allowed and last in (*AFTER_COMMA,):
        return SPACE
    likely = [id for id in allowed if id >= FIRST_CONTROL or id not in UNLIKELY]
    return next((id for id in likely if id >= FIRST_CONTROL), (likely or allowed)[0])
