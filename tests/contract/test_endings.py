"""Every family's answers can be brought to an end, whatever they have to be.

Where no ending is found, an answer under a grammar is cut at its token limit.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mlx_server.checkpoints.checkpoint import read_checkpoint
from mlx_server.families import FAMILIES, family_named
from mlx_server.families.base import ModelFamily
from mlx_server.grammars.lark import OPTIONS
from mlx_server.messages import Tool
from mlx_server.parsers.output_spec import OutputSpec
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.requests import Format, JsonFormat, NamedTool, ToolChoice
from mlx_server.sources.replay_checkpoint import replay_checkpoint
from mlx_server.worker.constrained_decoding import grammar_compiler
from mlx_server.worker.constrained_decoding.grammar_compiler import fill_bitmask
from mlx_server.worker.constrained_decoding.grammar_completion import GrammarCompletion
from mlx_server.worker.constrained_decoding.token_trie import Vocabulary
from tests.contract.pairs import FORMATS, PARAMETERS
from tests.contract.structured import NESTED

pytestmark = pytest.mark.tables

TOOLS = tuple(Tool(name, "", parameters) for name, parameters in PARAMETERS.items())
LARGER = (*TOOLS, Tool("order", "", NESTED))
LONGEST = 1000
"""Tokens, of which some vocabularies have one for each byte."""

WANTED: list[tuple[ToolChoice, tuple[Tool, ...], Format | None]] = [
    ("required", TOOLS, None),
    ("required", LARGER[2:], None),
    (NamedTool("add"), LARGER, None),
    ("auto", LARGER, JsonFormat(NESTED)),
    *(("none", (), value.format) for value in FORMATS),
]


@cache
def built(folder: Path, stop_tokens: tuple[int, ...]) -> Vocabulary:
    """The slowest part, and the same for all tests of a checkpoint."""
    return Vocabulary(folder, stop_tokens).build()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of all replay models."""
    yield tmp_path_factory.mktemp("checkpoints")
    built.cache_clear()


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_an_ending_is_known_from_the_beginning(name: str, checkpoints: Path) -> None:
    family = family_named(name)
    assert unended(family, replay_checkpoint(checkpoints, family, None)) == []


@pytest.mark.parametrize("name", ["smollm2", "plain", "lfm2", "llama3"])
def test_also_in_the_words_of_a_real_vocabulary(name: str, demo_path: Path) -> None:
    assert unended(family_named(name), demo_path) == []


@pytest.mark.parametrize("name", ["muse", "gpt_oss", "qwen3", "minimax_m3", "kimi_k3"])
def test_a_thought_may_begin_where_it_and_a_call_have_room(name: str, checkpoints: Path) -> None:
    family = family_named(name)
    folder = replay_checkpoint(checkpoints, family, None)
    checkpoint = read_checkpoint(folder)
    vocabulary = built(folder, tuple(sorted(family.stops(checkpoint))))
    context = ParseContext(tools=TOOLS, control=checkpoint.tokenizer.control_tokens)
    source = family.grammar(OutputSpec(context, NamedTool("look"), None, True))
    assert source is not None
    grammar = grammar_compiler._compile(source, vocabulary)
    ending = grammar.completion.tokens
    assert ending is not None
    (opens, *_), (closes, *_) = family.thinking_delimiters()
    around = len(checkpoint.tokenizer.encode(f"{opens}{closes}{family.answer_prefix}"))
    mask = np.zeros_like(vocabulary.ends)
    fill_bitmask(mask, grammar.matcher, vocabulary)
    completion = GrammarCompletion(vocabulary.token_classes, grammar.completion, grammar.search)
    completion.allow(mask.view(np.int32), len(ending) + around + 8)
    first = checkpoint.tokenizer.encode(opens)[0]
    assert mask[first // 32] >> first % 32 & 1, vocabulary.text[first]


def test_whoever_reasons_can_be_led_out_of_it() -> None:
    for family in FAMILIES:
        opens, _ = family.thinking_delimiters()
        assert bool(opens) == bool(family.answer_prefix), family.name


@pytest.mark.parametrize(
    "source",
    [
        'start: /[^"]*/ T\nT: "\\n" "a"',
        'start: "\\x41"',
        "start: /\"/ /'/",
        'start: /a/ "b" // "\n',
    ],
)
def test_what_a_grammar_spells_out_is_no_obstacle(source: str, demo_path: Path) -> None:
    """Its texts are looked for, in any message."""
    vocabulary = built(demo_path, (2,))
    assert grammar_compiler._compile(f"{OPTIONS}\n{source}\n", vocabulary).matcher


def unended(family: ModelFamily, folder: Path) -> list[str]:
    checkpoint = read_checkpoint(folder)
    vocabulary = built(folder, tuple(sorted(family.stops(checkpoint))))
    control, thinks = checkpoint.tokenizer.control_tokens, family.thinks(checkpoint)
    found = []
    for choice, tools, format in WANTED:
        reading = ParseContext(tools=tools, ends_with="assistant: ", control=control)
        source = family.grammar(OutputSpec(reading, choice, format, thinks))
        if source is None:  # a family that knows no calls
            continue
        ending = grammar_compiler._compile(source, vocabulary).completion.tokens
        if ending is None or len(ending) > LONGEST:
            found.append(f"{choice}, {format}: {ending}")
    return found
