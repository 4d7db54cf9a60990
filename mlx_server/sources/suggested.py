"""Models of the hub for those who know none yet: which fit a machine, and with what context."""

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import yaml

from mlx_server.engine.messages import KvCost
from mlx_server.errors import ModelNotFound
from mlx_server.sources.kinds import HUB_ID
from mlx_server.sources.source import on_disk

USEFUL_CONTEXT = 4096
"""Tokens; a model that leaves room for fewer does not fit."""

LIST = "`mlx-server models --suggest` lists those that fit this machine."


class SuggestedModel(msgspec.Struct, frozen=True):
    id: str
    family: str
    quantization: str
    bytes: int
    """The size of the weights, on disk and in memory."""
    context: int
    kv: KvCost
    good_at: str

    def context_in(self, budget: int) -> int:
        """The tokens of one conversation that fit a memory budget next to the weights, as the pool
        counts them; 0 if the model does not fit."""
        tokens = self.kv.tokens_in(budget - self.bytes, self.context)
        return tokens if tokens >= USEFUL_CONTEXT else 0

    def described(self, budget: int) -> dict[str, Any]:
        return {
            "id": self.id,
            "bytes": self.bytes,
            "context": self.context_in(budget),
            "good_at": self.good_at,
            "is_here": on_disk(self.id) is not None,
            "command": f"mlx-server pull {self.id}",
        }


@cache
def suggested_models() -> Sequence[SuggestedModel]:
    """All of them, the smallest first."""
    text = files(__package__).joinpath("suggested.yaml").read_text("utf-8")
    return msgspec.convert(yaml.safe_load(text), tuple[SuggestedModel, ...])


def hub_id(name: str, budget: int) -> str:
    """The hub id that a name such as `qwen3.5-9b` means; hub ids and paths stay as they are. Raises
    ModelNotFound for a name that several models have or none, with those that fit."""
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII) or HUB_ID.fullmatch(name):
        return name
    meant = [each for each in suggested_models() if _plain(name) in _plain(each.id)]
    if len(meant) == 1:
        return meant[0].id
    fitting = [each.id for each in meant if each.context_in(budget)]
    if fitting:
        raise ModelNotFound(f"{name!r} may be {' or '.join(fitting)}. Name one of them.")
    why = "None of that name fits this machine." if meant else "It is no hub id (org/name)."
    raise ModelNotFound(f"{name!r} is not known. {why} {LIST}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower())
