"""The plainest text that a grammar allows, such as one call whose arguments leave no choice."""

from collections.abc import Sequence

import llguidance
from llguidance import LLMatcher, LLTokenizer

from mlx_server.errors import InvalidGrammar
from mlx_server.schemas.compiler import LIMITS, in_a_line

END = 256
FIRST_CONTROL = END + 1
SPACE, AFTER_COMMA = ord(" "), b",:"
UNLIKELY = b" \t\r\n\\"
"""White space and escapes, which grammars allow and texts rarely need."""


class _BytesAndControlTokens:
    """A vocabulary that spells any text byte by byte, and has these control tokens."""

    eos_token_id = END
    bos_token_id = None

    def __init__(self, control: Sequence[str]) -> None:
        single = (bytes([byte]) for byte in range(END))
        self.tokens = (*single, b"<|end|>", *(token.encode() for token in control))
        self.special_token_ids = tuple(range(END, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def control_ids(control: Sequence[str]) -> dict[int, str]:
    """Returns the ids by which a grammar for `first_text` has to name these control tokens."""
    return dict(enumerate(control, FIRST_CONTROL))


def first_text(grammar: str, control: Sequence[str]) -> str:
    """Returns the text up to the first place where the grammar may end. Raises InvalidGrammar."""
    vocabulary = _BytesAndControlTokens(control)
    tokens = vocabulary.tokens
    tokenizer = LLTokenizer(
        llguidance.TokenizerWrapper(vocabulary), n_vocab=len(tokens), eos_token=END, slices=[]
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    found: list[int] = []
    while not (matcher.is_error() or matcher.is_accepting() or matcher.is_stopped()):
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & ~(1 << END)
        if matcher.is_error():
            break
        found.append(_plainest(mask, found[-1] if found else END))
        matcher.consume_token(found[-1])
    if matcher.is_error():
        raise InvalidGrammar(in_a_line(matcher.get_error()))
    return b"".join(tokens[id] for id in found).decode()


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
