"""The arguments of a call as an object, for APIs that send them so instead of as text."""

import json
from typing import Any


def arguments_object(text: str) -> dict[str, Any]:
    """Empty for a call that was cut off. Halves of surrogate pairs, which a model may write as
    escapes, are no text that could be sent, and are replaced."""
    try:
        found = json.loads(text or "{}")
        found = json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
