"""The table of model families. A checkpoint belongs to the family with the most evidence.

The template outweighs the model type, since fine-tunes bring other call formats to an architecture,
for example Hermes' to Llama and DeepSeek's to Qwen. Of families with equal evidence the first in
the table is taken.
"""

import logging
from collections.abc import Mapping
from difflib import get_close_matches

from mlx_server.checkpoints.checkpoint import Checkpoint
from mlx_server.checkpoints.encoders import is_encoder
from mlx_server.errors import SettingsError
from mlx_server.families.apertus import APERTUS
from mlx_server.families.apriel import APRIEL
from mlx_server.families.base import ModelFamily
from mlx_server.families.by_template import confirmed
from mlx_server.families.command import COMMAND
from mlx_server.families.command_r import COMMAND_R
from mlx_server.families.deepseek_v3 import DEEPSEEK_V3
from mlx_server.families.deepseek_v32 import DEEPSEEK_V32
from mlx_server.families.dots import DOTS
from mlx_server.families.ernie4_5 import ERNIE4_5
from mlx_server.families.exaone4 import EXAONE4
from mlx_server.families.functionary import FUNCTIONARY, FUNCTIONARY_V2
from mlx_server.families.functiongemma import FUNCTION_GEMMA
from mlx_server.families.gemma3 import GEMMA3
from mlx_server.families.gemma4 import GEMMA4
from mlx_server.families.gigachat import GIGACHAT, GIGACHAT35
from mlx_server.families.glm4 import GLM4, GLM4_5
from mlx_server.families.gpt_oss import GPT_OSS
from mlx_server.families.granite import GRANITE
from mlx_server.families.granite_code import GRANITE_CODE
from mlx_server.families.harmony_text import HARMONY_TEXT
from mlx_server.families.hermes import HERMES
from mlx_server.families.hunyuan import HUNYUAN
from mlx_server.families.hy3 import HY3
from mlx_server.families.hyperclova import HYPERCLOVA
from mlx_server.families.inkling import INKLING
from mlx_server.families.internlm import INTERNLM
from mlx_server.families.jamba import JAMBA
from mlx_server.families.k2_horizon import K2_HORIZON
from mlx_server.families.kimi_k2 import KIMI_K2
from mlx_server.families.kimi_k3 import KIMI_K3
from mlx_server.families.lfm2 import LFM2
from mlx_server.families.llama3 import LLAMA3
from mlx_server.families.llama4 import LLAMA4
from mlx_server.families.longcat import LONGCAT
from mlx_server.families.minicpm import MINICPM, MINICPM5
from mlx_server.families.minimax_m2 import MINIMAX_M2
from mlx_server.families.minimax_m3 import MINIMAX_M3
from mlx_server.families.mistral import MISTRAL
from mlx_server.families.muse import MUSE
from mlx_server.families.nemotron import NEMOTRON, NEMOTRON3
from mlx_server.families.olmo3 import OLMO3
from mlx_server.families.pangu import PANGU
from mlx_server.families.phi4 import PHI4
from mlx_server.families.plain import PLAIN
from mlx_server.families.plamo import PLAMO
from mlx_server.families.qwen3 import QWEN3
from mlx_server.families.qwen3_5 import QWEN3_5
from mlx_server.families.qwen3_coder import QWEN3_CODER
from mlx_server.families.seed_oss import SEED_OSS
from mlx_server.families.smollm2 import SMOLLM2
from mlx_server.families.smollm3 import SMOLLM3
from mlx_server.families.solar_open import SOLAR_OPEN, SOLAR_OPEN2
from mlx_server.families.step3 import STEP3
from mlx_server.prompts.template_capabilities import template_capabilities
from mlx_server.templates.chat_template import TemplateLimitExceeded

log = logging.getLogger("mlx_server.families")

FAMILIES: tuple[ModelFamily, ...] = (
    SMOLLM2,
    SMOLLM3,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    QWEN3_CODER,
    QWEN3_5,
    QWEN3,
    FUNCTION_GEMMA,
    GEMMA3,
    GEMMA4,
    KIMI_K2,
    KIMI_K3,
    GLM4_5,
    GLM4,
    MINIMAX_M2,
    SEED_OSS,
    NEMOTRON,
    NEMOTRON3,
    HERMES,
    LLAMA3,
    LLAMA4,
    MISTRAL,
    GRANITE,
    PHI4,
    LFM2,
    OLMO3,
    EXAONE4,
    COMMAND,
    GPT_OSS,
    HARMONY_TEXT,
    APERTUS,
    APRIEL,
    COMMAND_R,
    DOTS,
    ERNIE4_5,
    FUNCTIONARY,
    FUNCTIONARY_V2,
    GIGACHAT,
    GIGACHAT35,
    GRANITE_CODE,
    HUNYUAN,
    HYPERCLOVA,
    INKLING,
    INTERNLM,
    JAMBA,
    LONGCAT,
    MINICPM,
    MINICPM5,
    MINIMAX_M3,
    MUSE,
    PANGU,
    PLAMO,
    SOLAR_OPEN,
    SOLAR_OPEN2,
    HY3,
    K2_HORIZON,
    STEP3,
    PLAIN,
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
    if template is None or family.renderer or family.overrides:
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
    for family in FAMILIES:
        if family.name == name:
            return family
    names = [family.name for family in FAMILIES]
    nearest = get_close_matches(name[:100].lower(), names, 1)
    meant = f": did you mean `{nearest[0]}`?" if nearest else "."
    raise SettingsError(
        f"There is no model family {name[:100]!r}{meant} Known families: {', '.join(names)}."
    )
