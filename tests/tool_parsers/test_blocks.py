"""What a grammar of calls allows, the family's parser reads: finished, valid, and nothing else."""

import jsonschema
import pytest

from mlx_server.events import Event
from mlx_server.families import family_named
from mlx_server.messages import Tool
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.tool_parsers.call_format import finished_calls
from tests.families.goldens import tokenizer_of
from tests.tool_parsers.block_grammars import CLOSING, TOOLS, grammar_of, marked
from tests.walks import walk

pytestmark = pytest.mark.slow

NOTATED = [
    *("qwen3_coder", "nemotron3", "seed_oss", "minimax_m2", "deepseek_v32", "glm4_5", "kimi_k3"),
    *("gemma4", "functiongemma", "lfm2", "olmo3", "llama4"),
]


def read(family: str, ids: list[int], tools: tuple[Tool, ...]) -> list[Event]:
    tokenizer = tokenizer_of(family)
    text = tokenizer.detokenizer()
    control = tokenizer.control_tokens
    parser = family_named(family).make_parser(ParseContext(tools=tools, control=control))
    events = [event for id in ids for event in parser.feed(id, text.feed(id))]
    return events + parser.finish(cut=False)


@pytest.mark.parametrize("family", NOTATED)
def test_what_is_allowed_is_read_as_calls(family: str) -> None:
    for notation, opens in marked(family):
        grammar = grammar_of(family, notation, opens, TOOLS)
        for seed in range(4):
            ids = walk(family, grammar, seed, CLOSING)
            said = f"seed {seed}: {tokenizer_of(family).raw(ids)!r}"
            events = read(family, ids, TOOLS)
            kinds = {type(event).__name__ for event in events}
            kinds -= {"Repaired"} if notation.repairs else set()
            assert kinds <= {"ToolCallStarted", "ToolCallDelta", "ToolCallFinished"}, said
            calls = finished_calls(events)
            assert calls, said
            assert len(calls) == sum(type(e).__name__ == "ToolCallStarted" for e in events), said
            schemas = {tool.name: tool.parameters for tool in TOOLS}
            for call in calls:
                jsonschema.validate(call["arguments"], schemas[call["name"]])
