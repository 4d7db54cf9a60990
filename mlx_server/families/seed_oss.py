"""Seed-OSS: `seed:` tags for every part, also for the model's reflections on its budget."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import MarkupLayout
from mlx_server.tool_parsers.tag_formats import SEED_OSS as CALLS
from mlx_server.tool_parsers.tag_formats import SEED_OSS_WITHOUT_BLOCK

OPEN, CLOSE = "<seed:think>", "</seed:think>"
BUDGET, BUDGET_END = "<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>"

# with a thinking budget of 0 the prompt ends within a reflection, which the second pair opens
LAYOUT = MarkupLayout(
    reasoning=((OPEN, CLOSE), (OPEN + BUDGET, CLOSE)),
    call_formats=(CALLS, SEED_OSS_WITHOUT_BLOCK),
    calls_end_reasoning=True,
)

SEED_OSS = ModelFamily(
    name="seed_oss",
    layout=LAYOUT,
    answer_prefix=CLOSE,
    model_types=("seed_oss",),
    stop_tokens=("<seed:eos>",),
    special_tokens=(
        "<seed:bos>",
        "<seed:eos>",
        "<seed:pad>",
        OPEN,
        CLOSE,
        BUDGET,
        BUDGET_END,
        "<seed:tool_call>",
        "</seed:tool_call>",
    ),
)
