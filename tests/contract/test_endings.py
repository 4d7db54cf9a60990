"""Every family's JSON can be brought to an end: a formatted answer and the arguments of a call.

Where no ending is found, an answer under a grammar is cut at its token limit.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mlx_server.engine.messages import Grammar
from mlx_server.families import FAMILIES, family_named
from mlx_server.families.base import ModelFamily
from mlx_server.grammars.lark import OPTIONS
from mlx_server.messages import Message, Tool, ToolCall
from mlx_server.models.checkpoint import read_checkpoint
from mlx_server.parsers.parse_context import OutputSpec, ParseContext
from mlx_server.requests import JsonFormat, ToolChoice
from mlx_server.sources.replay_checkpoint import replay_checkpoint
from mlx_server.sources.transcript import write_answer
from mlx_server.worker.constrained_decoding import grammar_compiler
from mlx_server.worker.constrained_decoding.grammar_compiler import fill_bitmask
from mlx_server.worker.constrained_decoding.grammar_completion import GrammarCompletion
from mlx_server.worker.constrained_decoding.mask_threads import YieldingMatcher
from mlx_server.worker.constrained_decoding.vocabulary import Vocabulary
from tests.contract.pairs import WITH_CALLS
from tests.contract.structured import NESTED
from tests.tables import cases

ADDRESS = {"street": "Bahnhofstrasse 1", "city": "Zürich", "country": "CH"}
ORDER = {
    "id": 12,
    "status": "paid",
    "customer": {"name": "Ada", "billing": ADDRESS, "shipping": None},
    "items": [{"sku": "a", "quantity": 2, "price": 1.5}, {"sku": "b", "quantity": 1, "price": 20}],
}
TEXT = json.dumps(ORDER, ensure_ascii=False)
OWN_NOTATIONS = {
    *("deepseek_v32", "dots", "functiongemma", "gemma4", "gigachat35", "glm4_5", "hy3"),
    *("k2_horizon", "kimi_k3", "lfm2", "minicpm", "minicpm5", "minimax_m2", "minimax_m3"),
    *("muse", "nemotron3", "olmo3", "qwen3_5", "qwen3_coder", "seed_oss", "solar_open2"),
    *("step3", "step3_5"),
}
"""Families that write the arguments of calls in a notation of their own: calls are cut there."""


@cache
def built(folder: Path, stop_tokens: tuple[int, ...]) -> Vocabulary:
    """The slowest part, and the same for all tests of a checkpoint."""
    return Vocabulary(folder, stop_tokens).build()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of all replay models."""
    yield tmp_path_factory.mktemp("checkpoints")
    built.cache_clear()


def unended(name: str, folder: Path, answer: Message) -> list[str] | None:
    """Returns the places in the family's JSON at which it has no ending; None if the answer as the
    family writes it has no JSON."""
    family = family_named(name)
    checkpoint = read_checkpoint(folder)
    written = write_answer(family, checkpoint.tokenizer, answer)
    if '"status": "paid"' not in written and '"status":"paid"' not in written:
        return None
    format = None if answer.tool_calls else JsonFormat(NESTED)
    return places_without_ending(family, folder, written, '"customer', format)


def places_without_ending(
    family: ModelFamily, folder: Path, written: str, begin: str, format: JsonFormat | None = None
) -> list[str]:
    """Looks at every fifth token from `begin` on, up to the price of an item."""
    checkpoint = read_checkpoint(folder)
    vocabulary = built(folder, tuple(sorted(family.stops(checkpoint))))
    tools = (Tool("order", "", NESTED),)
    context = ParseContext(tools=tools, control=checkpoint.tokenizer.control_tokens)
    choice: ToolChoice = "none" if format else "required"
    source = family.grammar(OutputSpec(context, choice, format, thinks=False))
    assert source is not None
    grammar = grammar_compiler.compiled(source, vocabulary)
    matcher = YieldingMatcher(grammar.matcher.deep_copy())
    mask, text, places = np.zeros_like(vocabulary.ends), b"", list[str]()
    tokens = checkpoint.tokenizer.encode(written)
    for at, token in enumerate(tokens):
        assert matcher.consume_token(token), text
        text += vocabulary.text[token]
        is_over = b'"price' in text.partition(b'"b"')[2]
        if begin.encode() in text and not is_over and at % 5 == 0:
            fill_bitmask(mask, matcher.own, vocabulary)
            completion = GrammarCompletion(vocabulary.token_classes, grammar.completion)
            for begun in tokens[: at + 1]:
                completion.advance(begun)
            completion.allow(mask.view(np.int32), 2, matcher)
            if completion.ending is None:
                places.append(text.decode("utf-8", "replace"))
    return places


@pytest.mark.slow
@pytest.mark.parametrize("name", [f.name for f in FAMILIES if f.name != "harmony_text"])
def test_a_formatted_answer_is_ended(name: str, checkpoints: Path) -> None:
    folder = replay_checkpoint(checkpoints, family_named(name))
    assert unended(name, folder, Message("assistant", TEXT)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [family.name for family in WITH_CALLS])
def test_the_arguments_of_a_call_are_ended(name: str, checkpoints: Path) -> None:
    folder = replay_checkpoint(checkpoints, family_named(name))
    call = ToolCall("1", "order", TEXT)
    places = unended(name, folder, Message("assistant", tool_calls=(call,)))
    assert places == ([] if name not in OWN_NOTATIONS else None)


@cases
def test_the_object_around_the_arguments_is_ended(
    name: str, written: str, begin: str, checkpoints: Path
) -> None:
    family = family_named(name)
    folder = replay_checkpoint(checkpoints, family)
    output = written.replace("%s", TEXT.replace('"b"', '"c"'))
    assert places_without_ending(family, folder, output, begin) == []


@pytest.mark.slow
@cases
def test_what_a_grammar_spells_out_is_no_obstacle(source: str, demo_path: Path) -> None:
    """Its texts are looked for, in any message."""
    vocabulary = built(demo_path, (2,))
    assert grammar_compiler.compiled(Grammar(f"{OPTIONS}\n{source}\n"), vocabulary).matcher
