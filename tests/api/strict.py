"""Bodies and chunks against the own models of OpenAI's and Anthropic's SDKs, in strict mode."""

import json
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter

OURS = {"reasoning", "reasoning_content", "mlx_server"}
"""What we send next to OpenAI's own fields, and where clients look for it: in messages and deltas
(DeepSeek's name for it, and vLLM's), and on top of all, our own remarks."""


def assert_strict(kind: Any, body: Any, ours: Collection[str] = OURS) -> None:
    """Checks the types, which are not converted, and that no field is unknown. kind: a model of the
    SDK, or a union of its models."""
    found = _adapter(kind).validate_json(json.dumps(body), strict=True)
    unknown = {name for name in _extra(found) if name.rpartition(".")[2] not in ours}
    assert not unknown, f"{kind} has no {unknown}"


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _extra(value: Any, where: str = "") -> Iterator[str]:
    match value:
        case BaseModel():
            yield from (f"{where}{name}" for name in value.model_extra or ())
            for name in type(value).model_fields:
                yield from _extra(getattr(value, name), f"{where}{name}.")
        case list():
            for item in value:
                yield from _extra(item, where)
