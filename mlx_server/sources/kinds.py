"""The kinds of a model's source, distinguished by its text alone."""

import re

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)

KINDS = "the path of a folder, a hub id such as mlx-community/Qwen3-0.6B-4bit, or demo:smollm2"

DEMO = "demo:smollm2"

SCHEME = re.compile(r"(?=\w\w)[A-Za-z][\w+.-]*:")
"""The beginning of a source that names its kind; a single letter is a drive of Windows."""

HUB = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")


def why_impossible(source: str) -> str | None:
    """Says why no model can ever be found at a source, and what to write; None if one may be. An
    URL is not repeated, since it may have a password."""
    if source and not SCHEME.match(source):
        return None
    kind, _, name = source.partition(":")
    if source == DEMO or (kind == "hf" and HUB_ID.fullmatch(name)):
        return None
    if kind == "demo":
        return f"There is no demo model {name!r}; the only one is {DEMO}."
    if kind == "hf":
        return f"{name!r} is not a hub id. Write hf:org/name."
    if match := HUB.match(source):
        return f"A model of the hub is named by its id: write {match[1]}."
    if kind.lower() in ("http", "https"):
        return "A model on another server needs its API in front of the URL: write openai+http..."
    if kind.lower() == "file":
        return "A folder is named by its path alone, without file: in front of it."
    return f"{kind!r} is not a known kind of model source. Use {KINDS}."
