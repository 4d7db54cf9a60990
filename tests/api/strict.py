"""Bodies and chunks against the OpenAI SDK's own models, in strict mode."""

from collections.abc import Collection, Iterator
from typing import Any

from pydantic import BaseModel

OURS = {"reasoning", "reasoning_content", "mlx_server"}
"""What we send next to OpenAI's own fields, and where clients look for it: in messages and deltas
(DeepSeek's name for it, and vLLM's), and on top of all, our own remarks."""


def assert_strict(kind: type[BaseModel], body: Any, ours: Collection[str] = OURS) -> None:
    """The types without conversion, and no unknown field."""
    found = kind.model_validate(body, strict=True)
    unknown = {name for name in _extra(found) if name.rpartition(".")[2] not in ours}
    assert not unknown, f"{kind.__name__} has no {unknown}"


def _extra(value: Any, where: str = "") -> Iterator[str]:
    match value:
        case BaseModel():
            yield from (f"{where}{name}" for name in value.model_extra or ())
            for name in type(value).model_fields:
                yield from _extra(getattr(value, name), f"{where}{name}.")
        case list():
            for item in value:
                yield from _extra(item, where)
