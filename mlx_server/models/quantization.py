"""How config.json says that weights are quantised, what mlx-lm understands of it, and how weights
differ from what their config.json says."""

import re
from collections.abc import Mapping
from typing import Any

MLX, OTHERS = "quantization", "quantization_config"
"""The key of mlx-lm, and the one of other libraries, which mlx-lm writes too."""

MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
BITS = (2, 3, 4, 5, 6, 8)
METHODS = (
    "awq and gptq with 4 bits, mxfp4, mxfp8, nvfp4 of modelopt and compressed-tensors, bitnet, and "
    "fp8 where the architecture unpacks it"
)

CONVERTED = "Use a checkpoint that `mlx_lm.convert` made, for example from mlx-community."

NAME = r"\s*([^\s,]+?)\.?(?:[\s,]|$)"
SHAPE = r"(\([0-9, ]*+\))"
MISMATCHES = (
    (
        re.compile(rf"Received (\d+) parameters not in model:{NAME}"),
        "its weights have {0} tensors that mlx-lm's model lacks, such as {1:.200}. They belong to "
        "parts that mlx-lm does not use, or config.json is not of these weights. " + CONVERTED,
    ),
    (
        re.compile(rf"Missing (\d+) parameters:{NAME}"),
        "its weights lack {0} tensors of mlx-lm's model, such as {1:.200}. Download it again, with "
        "the config.json of these weights.",
    ),
    (
        re.compile(rf"Expected shape {SHAPE} but received shape {SHAPE} for parameter{NAME}"),
        "its tensor {2:.200} has the shape {1}, and by config.json it should have {0}. Copy the "
        "config.json of these weights.",
    ),
    (
        re.compile(r"missing \d+ required positional arguments?: (.+)"),
        "config.json lacks {0:.200}. Copy it from the original.",
    ),
)
"""What mlx-lm says of a config.json that is not of the weights, and what to do."""


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of a checkpoint that mlx-lm quantised; None if it did not."""
    own, other = config.get(MLX), config.get(OTHERS)
    if own is None and isinstance(other, dict) and "quant_method" not in other:
        own = other if {"group_size", "bits"} <= other.keys() else None
    return own if isinstance(own, dict) else None


def why_not_read(config: Mapping[str, Any], error: str) -> str | None:
    """Says which key of a config is not understood, and what is, or how the weights differ from it.
    error: what mlx-lm said of the weights. None: the error is another one."""
    if (own := config.get(MLX)) is not None and (what := _wrong_settings(own)):
        return what
    if own is None and (other := config.get(OTHERS)):
        method = other.get("quant_method") if isinstance(other, dict) else other
        why = f", or mlx-lm can't read them: {error[:300]}"
        if "local variable" in error:  # of a loop over packed tensors that found none
            why = ": no tensor is packed so"
        return (
            f"its weights are not what `{OTHERS}` in config.json says (`quant_method`: "
            f"{str(method)[:100]!r}){why}. It reads {METHODS}. {CONVERTED}"
        )
    if own is None and ".scales" in error:
        return (
            f"its weights are quantised, and config.json has no `{MLX}` that says how. Add "
            f'`"{MLX}": {{"group_size": 64, "bits": 4}}` with the values that were used. '
            f"{CONVERTED}"
        )
    return next(
        (
            what.format(*match.groups())
            for pattern, what in MISMATCHES
            if (match := pattern.search(error))
        ),
        None,
    )


def _wrong_settings(found: object) -> str | None:
    """What is wrong with the value of `quantization`, or with that of a layer in it."""
    if not isinstance(found, dict):
        return _sentence(MLX, found, "an object with `group_size` and `bits`")
    for name in ("group_size", "bits"):
        if name not in found:
            return f"`{MLX}` in config.json lacks `{name}`. Copy it from the original. {CONVERTED}"
    layers = {f"{MLX}.{name}": it for name, it in found.items() if isinstance(it, dict)}
    for place, entry in {MLX: found, **layers}.items():
        if (bits := entry.get("bits", BITS[0])) not in BITS or isinstance(bits, bool):
            return _sentence(f"{place}.bits", bits, f"one of {', '.join(map(str, BITS))}")
        if (mode := entry.get("mode", MODES[0])) not in MODES:
            return _sentence(f"{place}.mode", mode, f"one of {', '.join(MODES)}")
        size = entry.get("group_size", 64)
        if type(size) is not int or size not in (16, 32, 64, 128):
            return _sentence(f"{place}.group_size", size, "16, 32, 64 or 128")
    return None


def _sentence(key: str, found: object, known: str) -> str:
    return (
        f"`{key[:200]}` in config.json is {str(found)[:100]!r}; mlx-lm reads {known}. {CONVERTED}"
    )
