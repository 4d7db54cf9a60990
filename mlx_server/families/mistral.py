"""Mistral, Mixtral, Ministral, Magistral, Devstral: `[INST]`, `[THINK]`, `[TOOL_CALLS]`."""

import re
from hashlib import sha256

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.markup.parser import THINK, MarkupLayout
from mlx_server.tool_parsers.call_ids import new_short_id
from mlx_server.tool_parsers.formats import MISTRAL as CALLS

ID = re.compile(r"[a-zA-Z0-9]{9}")


def nine_character_id(id: str, name: str, number: int) -> str:
    """The call's id, or a digest of it, in nine letters or digits, which many templates require."""
    return id if ID.fullmatch(id) else sha256(id.encode()).hexdigest()[:9]


# the first Magistral writes its reasoning between <think> tags, which are no control tokens there
LAYOUT = MarkupLayout(
    reasoning=(("[THINK]", "[/THINK]"), THINK), call_formats=(CALLS,), new_id=new_short_id
)

MISTRAL = ModelFamily(
    name="mistral",
    layout=LAYOUT,
    call_id=nine_character_id,
    answer_prefix="[/THINK]",
    model_types=("mistral", "mistral3", "mistral4", "ministral3", "mixtral", "pixtral"),
    stop_tokens=("</s>",),
    special_tokens=(
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "[TOOL_CONTENT]",
        "[ARGS]",
        "[CALL_ID]",
        "[THINK]",
        "[/THINK]",
    ),
)
