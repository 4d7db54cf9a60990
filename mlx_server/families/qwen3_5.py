"""Qwen3.5 and later: Qwen3-Coder's call format, after reasoning that a call may cut short."""

from dataclasses import replace

from mlx_server.families.qwen3_coder import QWEN3_CODER

QWEN3_5 = replace(
    QWEN3_CODER,
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    template_markers=(),
)
