"""Grammars of answers whose beginning is in the prompt."""

import json
from pathlib import Path

import pytest

from mlx_server.engine.messages import Grammar
from mlx_server.grammars.formats import format_rule
from mlx_server.grammars.lark import Lark
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.requests import ChoiceFormat, Format, JsonFormat
from mlx_server.worker.constrained_decoding.grammar_compiler import GrammarRefused, compiled
from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary
from tests.tiny import IM_END

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
WHOLE = '{"city": "Züri", "n": 7}'


@pytest.fixture(scope="module")
def vocabulary(tiny_path: Path) -> Vocabulary:
    return Vocabulary(tiny_path, [IM_END]).build()


@pytest.fixture(scope="module")
def tokenizer(tiny_path: Path) -> Tokenizer:
    return Tokenizer(tiny_path / "tokenizer.json")


def grammar(format: Format) -> Grammar:
    lark = Lark({})
    return lark.source(format_rule(format, lark))


def takes(
    vocabulary: Vocabulary, tokenizer: Tokenizer, format: Format, begun: str, rest: str
) -> bool:
    found = compiled(grammar(format), vocabulary, tokenizer.encode(begun)).matcher
    ids = tokenizer.encode(rest)
    if found.validate_tokens(ids) < len(ids):
        return False
    found.consume_tokens(ids)
    return bool(found.is_accepting())


def test_the_rest_and_nothing_else_is_allowed(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    format = JsonFormat(SCHEMA)
    for cut in range(len(WHOLE) + 1):
        begun, rest = WHOLE[:cut], WHOLE[cut:]
        assert takes(vocabulary, tokenizer, format, begun, rest), begun
        assert not takes(vocabulary, tokenizer, format, begun, rest + WHOLE), begun
        assert not (cut and takes(vocabulary, tokenizer, format, begun, WHOLE)), begun
    assert json.loads(WHOLE)


@pytest.mark.parametrize("begun", ["Here: ", "[", '{"town": ', '{"city": "a", "n": "'])
def test_what_begins_no_such_answer_is_refused(
    vocabulary: Vocabulary, tokenizer: Tokenizer, begun: str
) -> None:
    with pytest.raises(GrammarRefused, match="not the beginning"):
        compiled(grammar(JsonFormat(SCHEMA)), vocabulary, tokenizer.encode(begun))


def test_other_formats_go_on_as_well(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    format = ChoiceFormat(("yes", "yesterday"))
    for rest, taken in {"": True, "terday": True, "t": False, "yes": False}.items():
        assert takes(vocabulary, tokenizer, format, "yes", rest) == taken
