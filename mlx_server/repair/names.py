"""Finds the tool that a model meant by a slightly wrong name."""

import re
from collections.abc import Iterable

PREFIXES = ("functions.", "functions:", "function.", "tools.", "tool.", "default_api.")
LEAKED = re.compile(r"<\|.*|<｜.*|\[[A-Z_]+\].*", re.DOTALL)
"""Control tokens that leaked into the name, and the text after them."""

SUFFIX = re.compile(r"(\.(json|py)|\(\)|[\s.:]{1,3}(json|code)|:\d+)$")
"""A content type, brackets or a number, written as a part of the name."""


def match_tool_name(written: str, names: Iterable[str]) -> str | None:
    """Returns the matching name; None if no name, or more than one, could be meant."""
    known = list(names)
    if written in known:
        return written
    cleaned = LEAKED.sub("", written).strip().strip("\"'`").strip()
    bare = next((cleaned.removeprefix(p) for p in PREFIXES if cleaned.startswith(p)), cleaned)
    tail = cleaned.rpartition(":")[2]  # after the namespaces of a gateway
    namespaced = bare.rpartition(".")[2] if bare != cleaned else bare  # functions.namespace.name
    half = cleaned[: len(cleaned) // 2]  # a name that was written twice, or as its own namespace
    twice = [half] if cleaned in (half * 2, f"{half}.{half}") else []
    for candidate in (cleaned, bare, tail, *twice, SUFFIX.sub("", bare)):
        if candidate in known:
            return candidate
    folded = _folded(SUFFIX.sub("", bare))
    near = [name for name in known if folded and _folded(name) == folded]
    if not near and namespaced in known and not bare.startswith(PREFIXES):
        return namespaced
    # without its namespace
    near = near or [name for name in known if bare and name.endswith(f"__{bare}")]
    return near[0] if len(near) == 1 else None


def _folded(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()
