"""Qwen3.5 and later, and Step 3.5: reasoning, then calls in Qwen3-Coder's format."""

from dataclasses import replace

from mlx_server.families.qwen3_coder import QWEN3_CODER

QWEN3_5 = replace(
    QWEN3_CODER,
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "step3p5"),
    template_markers=(),
)
