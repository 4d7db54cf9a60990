"""`GET /v1/models` as Anthropic's clients expect it."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_server.errors import BadRequest

MOST, DEFAULT = 1000, 20
"""Bound on `limit`, and its default."""

Wire = dict[str, Any]


def model_info(model: Mapping[str, Any], context: int | None) -> Wire:
    """A model of OpenAI's list in Anthropic's form. `context`: None before it is known."""
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model["created"])),
        "lifecycle": "active",
        "max_input_tokens": context and context - 1,
        "max_tokens": context and context - 1,
    }


def page(models: Sequence[Wire], query: Mapping[str, str]) -> Wire:
    """A page of the list, by `limit` and either `after_id` or `before_id`."""
    limit = _limit(query.get("limit", str(DEFAULT)))
    ids = [model["id"] for model in models]
    if before := query.get("before_id"):
        end = _place(ids, before, "before_id")
        begin = max(0, end - limit)
        has_more = begin > 0
    else:
        after = query.get("after_id")
        begin = _place(ids, after, "after_id") + 1 if after else 0
        end = begin + limit
        has_more = end < len(ids)
    found = list(models[begin:end])
    first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return {"data": found, "first_id": first, "last_id": last, "has_more": has_more}


def _limit(text: str) -> int:
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MOST)) else 0
    if not 1 <= limit <= MOST:
        raise BadRequest(f"`limit` should be a whole number from 1 to {MOST}.", param="limit")
    return limit


def _place(ids: Sequence[str], id: str, param: str) -> int:
    if id not in ids:
        raise BadRequest(f"`{param}` names no model: {id[:100]!r}.", param=param)
    return ids.index(id)
