"""What a checkpoint folder says of its model, weights aside."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mlx_server.errors import ModelUnusable
from mlx_server.families.template import ChatTemplate
from mlx_server.families.tokenizer import Tokenizer
from mlx_server.requests import SamplingChoices

FALLBACK_CONTEXT = 4096

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    model_type: str
    context_length: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    tokens: dict[str, str]
    """bos_token, eos_token and the like, as templates spell them."""
    end_tokens: frozenset[int]
    """The ids that config.json, generation_config.json and the tokenizer call the end."""
    sampling: SamplingChoices
    """The publisher's recommendation."""


def read_checkpoint(path: Path, chat_template: str | None = None) -> Checkpoint:
    """chat_template: the owner's own, in place of the checkpoint's."""
    config = _json(path / "config.json")
    generation = _json(path / "generation_config.json", optional=True)
    tokenizer_config = _json(path / "tokenizer_config.json", optional=True)
    tokenizer = Tokenizer(_existing(path / "tokenizer.json"))
    tokens = _token_names(tokenizer_config)
    source = chat_template or _chat_template(path, tokenizer_config)
    return Checkpoint(
        path=path,
        model_type=str(config.get("model_type", "")),
        context_length=_context_length(config),
        tokenizer=tokenizer,
        template=ChatTemplate(source) if source else None,
        tokens=tokens,
        end_tokens=_end_tokens((config, generation), tokens, tokenizer),
        sampling=_sampling(generation),
    )


def _json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        found = json.loads(_existing(path).read_text("utf-8"))
    except ValueError as error:
        raise ModelUnusable(f"{path.name} is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ModelUnusable(f"{path.name} should hold an object.")
    return found


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ModelUnusable(
            f"{path.name} is missing from the model's folder {path.parent.name!r}. "
            "Download the model again, or convert it with `mlx_lm.convert`."
        )
    return path


def _token_names(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """A token is written as a string or as an object with its `content`."""
    named = {k: v for k, v in tokenizer_config.items() if k.endswith("_token")}
    spelled = {k: v.get("content") if isinstance(v, dict) else v for k, v in named.items()}
    return {k: v for k, v in spelled.items() if isinstance(v, str)}


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    if (file := path / "chat_template.jinja").is_file():
        return file.read_text("utf-8")
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):  # several by name: the one for plain chat
        found = {t["name"]: t["template"] for t in found}.get("default")
    return found if isinstance(found, str) else None


def _context_length(config: dict[str, Any]) -> int:
    text = config.get("text_config") or {}
    for found in (config.get("max_position_embeddings"), text.get("max_position_embeddings")):
        if isinstance(found, int) and found > 0:
            return found
    return FALLBACK_CONTEXT


def _end_tokens(
    configs: Iterable[dict[str, Any]], tokens: dict[str, str], tokenizer: Tokenizer
) -> frozenset[int]:
    found: set[int | None] = (
        {tokenizer.id_of(tokens["eos_token"])} if "eos_token" in tokens else set()
    )
    for config in configs:
        ids = config.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [ids])
    return frozenset(token for token in found if isinstance(token, int))


def _sampling(generation: dict[str, Any]) -> SamplingChoices:
    found = {k: v for k in SAMPLING_KEYS if isinstance(v := generation.get(k), int | float)}
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    return cast(SamplingChoices, found)
