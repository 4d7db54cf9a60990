"""Where a checkpoint keeps its chat templates: in files of their own, or in its configs.

As in transformers, files go before configs. Beyond it, chat_template.json and processor_config.json
are read, which it reads for images only, and a single template is the default whatever its name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_server.checkpoints.file_kind import read_own
from mlx_server.checkpoints.json_file import read_optional_json
from mlx_server.errors import ModelUnusable, public_message

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of chat templates in checkpoints with several."""

FILES = {
    DEFAULT: ("chat_template.jinja", f"additional_chat_templates/{DEFAULT}.jinja"),
    WITH_TOOLS: (f"additional_chat_templates/{WITH_TOOLS}.jinja",),
}
OF_PROCESSORS = ("chat_template.json", "processor_config.json")


def read_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The templates that are used, by name; most checkpoints have only a default one. Raises
    ModelUnusable."""
    found = {name: text for name in FILES if (text := _of_files(folder, name))}
    if DEFAULT not in found:
        configs = (read_optional_json(folder / name) for name in OF_PROCESSORS)
        named = next(filter(None, map(_named, (tokenizer_config, *configs))), {})
        found = {**named, **found}
    if DEFAULT not in found and len(found) == 1:
        found[DEFAULT] = next(iter(found.values()))
    return {name: text for name, text in found.items() if name in FILES}


def _of_files(folder: Path, name: str) -> str:
    paths = [folder / file for file in FILES[name]]
    written = [path for path in paths if path.is_file() and path.stat().st_size]
    return _text(written[-1]) if written else ""


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    """The `chat_template` of a config: a text, an object of texts by name, or a list of entries
    with a `name` and a `template`."""
    match config.get("chat_template"):
        case str(text):
            named: dict[Any, Any] = {DEFAULT: text}
        case dict(named):
            pass
        case list(entries):
            listed = [entry for entry in entries if isinstance(entry, dict)]
            named = {str(it["name"]): it.get("template") for it in listed if "name" in it}
        case _:
            return {}
    return {name: text for name, text in named.items() if isinstance(text, str) and text}


def _text(path: Path) -> str:
    try:
        text = read_own(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelUnusable(f"{path.name} can't be read: {public_message(error)}.") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
