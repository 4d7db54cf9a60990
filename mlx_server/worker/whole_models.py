"""mlx-vlm's models as a whole, of families whose text model mlx-lm lacks, called as mlx-lm's are.

They are told the embeddings of a pass, as mlx-lm's are: no row leaves anything on the model.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.models.architectures import TEXT, whole_package
from mlx_server.models.vision import MARKED, THREE_POSITIONS
from mlx_server.worker.mlx_lm_internals import ArraysCache, CacheList, KVCache, RotatingKVCache
from mlx_server.worker.sight import sight_of
from mlx_server.worker.vision_towers import own_modules, package_of

PARTS = ("text", "vision", "perceiver", "projector")
"""Those of mlx-vlm's settings that have a class of their own."""


def whole_classes(config: Mapping[str, Any]) -> tuple[type[nn.Module], type[Any]]:
    name = whole_package(config)
    package = package_of(str(name))

    class BorrowedModel(package.Model):  # type: ignore[name-defined]
        def __init__(self, settings: Any) -> None:
            with own_modules():
                super().__init__(settings)
            keeps = hasattr(self.language_model, "_rope_deltas")
            if keeps and name not in THREE_POSITIONS:
                raise ValueError(f"mlx-vlm's {name} keeps the positions of a row")
            self.model_type = name
            keeps_states = {*map(type, self.make_cache())} - {KVCache, RotatingKVCache}
            self.why_alone = f"mlx-vlm's {name} keeps the states of one row" * bool(keeps_states)

        def __call__(
            self, ids: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
        ) -> mx.array:
            named = dict[str, mx.array]()
            if name in THREE_POSITIONS:
                named["position_ids"] = self._positions(ids, cache)
            if name in MARKED and (sight := sight_of(self)) and sight.rows:
                named["image_mask"] = sight.marks(ids.shape[1])
            logits: mx.array = self.language_model(
                ids, inputs_embeds=input_embeddings, cache=cache, **named
            ).logits
            return logits

        def _positions(self, ids: mx.array, cache: Any) -> mx.array:
            if (sight := sight_of(self)) and sight.rows:
                return sight.positions(ids.shape[1])
            starts = mx.array(cache[0].offset if cache else 0).reshape(-1, 1)
            return mx.broadcast_to(starts + mx.arange(ids.shape[1]), (3, *ids.shape))

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            kinds = (package.VisionModel, package.LanguageModel)
            inner = [part for part in self.children().values() if isinstance(part, kinds)]
            for part in (super(), *inner):
                weights = getattr(part, "sanitize", dict)(weights)
            return weights

        @property
        def layers(self) -> Any:
            return self.language_model.layers

        def make_cache(self) -> list[Any]:
            """mlx-lm's in place of mlx-vlm's of the same names: these can be stored and joined."""
            if not hasattr(self.language_model, "make_cache"):
                return [KVCache() for _ in self.layers]
            # its layers ask for entries of a pair by its class
            package.LanguageModel.make_cache.__globals__["CacheList"] = CacheList
            with own_modules():
                return [_ours(cache) for cache in self.language_model.make_cache()]

    class BorrowedSettings:
        @staticmethod
        def from_dict(given: dict[str, Any]) -> Any:
            return settings_of(package, given)

    return BorrowedModel, BorrowedSettings


def whole_model(config: Mapping[str, Any]) -> nn.Module:
    """With random weights."""
    kind, settings = whole_classes(config)
    return kind(settings.from_dict(config))


def settings_of(package: Any, config: Mapping[str, Any]) -> Any:
    whole = deepcopy({**config})
    whole["text_config"] = next((whole[name] for name in TEXT if whole.get(name)), {})
    whole.setdefault("vision_config", {})
    settings = package.ModelConfig.from_dict(whole)
    for part in PARTS:
        kind = getattr(package, f"{part.title()}Config", None)
        if kind and hasattr(settings, f"{part}_config") and whole.get(f"{part}_config"):
            setattr(settings, f"{part}_config", kind.from_dict(whole[f"{part}_config"]))
    return settings


def _ours(cache: Any) -> Any:
    match type(cache).__name__:
        case "KVCache":
            return KVCache()
        case "RotatingKVCache":
            return RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
        case "ArraysCache":
            return ArraysCache(len(cache.cache))
        case "CacheList":
            return CacheList(*map(_ours, cache.caches))
        case other:
            raise ValueError(f"mlx-vlm keeps keys and values in its {other}")
