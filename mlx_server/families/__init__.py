"""The table of model families. A checkpoint belongs to the family with the most evidence.

The template outweighs the model type, since fine-tunes bring other call formats to an architecture,
for example Hermes' to Llama and DeepSeek's to Qwen. Of families with equal evidence the first in
the table is taken.
"""

import logging
from collections.abc import Mapping
from difflib import get_close_matches

from mlx_server.errors import SettingsError
from mlx_server.families import (
    harmony,
    json_families,
    literal_families,
    named_families,
    tag_families,
)
from mlx_server.families.base import ModelFamily, spelled
from mlx_server.families.by_template import confirmed
from mlx_server.families.json_families import PLAIN
from mlx_server.families.markup import MarkupFamily
from mlx_server.models.architectures import is_encoder
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.prompts.template_capabilities import template_capabilities
from mlx_server.system.sandbox.chat_template import TemplateLimitExceeded

log = logging.getLogger("mlx_server.families")

_MODULES = (harmony, json_families, literal_families, named_families, tag_families)
_BY_NAME = {
    family.name: family
    for module in _MODULES
    for family in vars(module).values()
    if isinstance(family, ModelFamily)
}
FAMILIES: tuple[ModelFamily, ...] = tuple(
    _BY_NAME[name]
    for name in spelled(
        "smollm2 smollm3 deepseek_v3 deepseek_v32 qwen3_coder qwen3_5 qwen3 functiongemma gemma3 "
        "gemma4 kimi_k2 kimi_k3 glm4_5 glm4 minimax_m2 seed_oss nemotron nemotron3 hermes llama3 "
        "llama4 mistral granite phi4 lfm2 olmo3 exaone4 command gpt_oss harmony_text apertus "
        "apriel command_r dots ernie4_5 functionary functionary_v2 gigachat gigachat35 "
        "granite_code hunyuan hyperclova inkling internlm jamba longcat minicpm minicpm5 "
        "minimax_m3 muse pangu plamo solar_open solar_open2 hy3 k2_horizon step3 step3_5 plain"
    )
)


def family_of(checkpoint: Checkpoint, named: str | None = None) -> ModelFamily:
    """The checkpoint's family, by its model type and chat template.

    named: the `family:` of models.yaml, which takes precedence. Raises SettingsError if it is not
    known.
    """
    if named is not None:
        return family_named(named)
    found = max(FAMILIES, key=lambda family: family.evidence(checkpoint))
    found = found if found.evidence(checkpoint) else PLAIN
    family = confirmed(found, PLAIN, FAMILIES, checkpoint)
    if family is PLAIN and not is_encoder(checkpoint.config):
        log.info(
            "model type %r belongs to no known family: using its chat template and JSON tool calls",
            checkpoint.model_type,
        )
    return family


def fitted(family: ModelFamily, checkpoint: Checkpoint) -> ModelFamily:
    """The family, which describes tools in the system prompt if the chat template has no place for
    them."""
    template = checkpoint.tool_template or checkpoint.template
    if template is None or not isinstance(family, MarkupFamily):
        return family
    try:
        has_place = template_capabilities(template, checkpoint.tokens).tools != "never"
    except TemplateLimitExceeded:  # rendering any request will raise it too
        return family
    return family if has_place else family.with_tools_in_prompt()


AS_TEXT: Mapping[str, str] = {"gpt_oss": "harmony_text"}
"""Maps a family whose parser needs token ids to the family that parses the same format as text,
for upstream models."""


def family_named(name: str) -> ModelFamily:
    if name in _BY_NAME:
        return _BY_NAME[name]
    names = [family.name for family in FAMILIES]
    nearest = get_close_matches(name[:100].lower(), names, 1)
    meant = f": did you mean `{nearest[0]}`?" if nearest else "."
    raise SettingsError(
        f"There is no model family {name[:100]!r}{meant} Known families: {', '.join(names)}."
    )
