"""A grammar and a text, byte by byte: does it match?"""

from typing import Any

import llguidance as ll
import pytest
from llguidance import LLMatcher, LLTokenizer

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars import formats
from mlx_server.grammars.compiler import LIMITS
from mlx_server.grammars.formats import format_rule
from mlx_server.grammars.lark import Lark
from mlx_server.requests import Format

END, CONTROL = 256, 257


class _Bytes:
    eos_token_id = END
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<|end|>", b"<think>")
    special_token_ids = (END, CONTROL)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENS = LLTokenizer(ll.TokenizerWrapper(_Bytes()), n_vocab=258, eos_token=END, slices=[])


class Refused(Exception):
    """By llguidance."""


def compiled(source: str) -> LLMatcher:
    matcher = LLMatcher(TOKENS, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise Refused(matcher.get_error())
    return matcher


def matcher_of(wanted: Format) -> LLMatcher:
    lark = Lark()
    return compiled(lark.source(format_rule(wanted, lark)).source)


def matches(matcher: LLMatcher, text: str | bytes) -> bool:
    """Whether this is a whole text of the grammar."""
    matcher = matcher.deep_copy()
    given = list(text.encode() if isinstance(text, str) else text)
    taken = matcher.try_consume_tokens(given)
    return taken == len(given) and not matcher.is_error() and matcher.is_accepting()


def allowed(matcher: LLMatcher) -> list[int]:
    mask = matcher.compute_bitmask()
    assert not matcher.is_error(), matcher.get_error()
    return [token for token in range(258) if mask[token >> 3] >> (token & 7) & 1]


def refusal(found: Any, *, strict: bool = False) -> str:
    with pytest.raises(InvalidGrammar) as caught:
        formats.check_schema(found, strict=strict, param="response_format")
    assert caught.value.param == "response_format"
    assert caught.value.code == "invalid_json_schema"
    assert caught.value.status == 400
    return caught.value.message


def within(inner: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a/b": inner}}


def assert_matches(wanted: Format, good: list[str], bad: list[str]) -> None:
    formats.check(wanted, "format")
    matcher = matcher_of(wanted)
    assert [text for text in good if not matches(matcher, text)] == []
    assert [text for text in bad if matches(matcher, text)] == []


def format_refusal(wanted: Format) -> str:
    with pytest.raises(InvalidGrammar) as caught:
        formats.check(wanted, "structured_outputs")
    assert caught.value.param == "structured_outputs"
    return caught.value.message
