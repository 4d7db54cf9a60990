"""Changes that make a checkpoint's folder as odd as those that people have."""

import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

from tests.tiny import CHAT_TEMPLATE

Change = Callable[[Path], object]
Json = dict[str, Any]

WEIGHTS, CONFIG = "model.safetensors", "config.json"
TOKENIZER, TOKENS = "tokenizer.json", "tokenizer_config.json"
GENERATION, INDEX = "generation_config.json", "model.safetensors.index.json"
MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
JINJA, LEGACY = "chat_template.jinja", "chat_template.json"
MORE = "additional_chat_templates"

BOM = b"\xef\xbb\xbf"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12881208\n"
PAGE = b"<!DOCTYPE html>\n<html><body>Access to this model is restricted.</body></html>"
XML = b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code></Error>'

START, END = "<|im_start|>", "<|im_end|>"
MINE = "[mine]{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|im_end|>{% endfor %}"
OTHER = "[other]" + CHAT_TEMPLATE
FOR_TOOLS = "{% if tools %}[{{ tools[0]['function']['name'] }}]{% endif %}" + CHAT_TEMPLATE


@dataclass(frozen=True)
class Odd:
    change: Change
    says: str = ""
    """What our refusal says; empty: it loads."""
    differs: str = ""
    """Why we do other than mlx-lm does; empty: we do as it does."""


def all_of(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def put(name: str, content: bytes | str | object) -> Change:
    """A file with these bytes, this text, or this as JSON."""

    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, bytes | str) else json.dumps(content)
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)

    return change


def gone(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def edited(name: str, edit: Callable[[Json], object]) -> Change:
    """A file of JSON, changed in place."""

    def change(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        edit(found)
        put(name, found)(folder)

    return change


def setting(name: str, **values: Any) -> Change:
    return edited(name, lambda found: found.update(values))


def without(name: str, *keys: str) -> Change:
    return edited(name, lambda found: [found.pop(key, None) for key in keys])


def marked(name: str) -> Change:
    return lambda folder: put(name, BOM + (folder / name).read_bytes())(folder)


# Weights


def arrays(folder: Path) -> dict[str, mx.array]:
    return mx.load(str(folder / WEIGHTS))  # type: ignore[return-value]


def shards(*names: str) -> Change:
    """The weights in files of these names instead; an empty name is a file that is missing."""

    def change(folder: Path) -> None:
        found = arrays(folder)
        mx.eval(found)
        (folder / WEIGHTS).unlink()
        for at, name in enumerate(names):
            if name:
                part = {key: found[key] for key in sorted(found)[at :: len(names)]}
                mx.save_safetensors(str(folder / name), part, {"format": "mlx"})

    return change


def index(*names: str) -> Change:
    def change(folder: Path) -> None:
        keys = sorted(arrays(folder)) if (folder / WEIGHTS).exists() else ["a", "b", "c"]
        listed = {key: names[at % len(names)] for at, key in enumerate(keys)}
        put(INDEX, {"metadata": {"total_size": 9}, "weight_map": listed})(folder)

    return change


def series(count: int, first: int = 1, digits: int = 5) -> list[str]:
    numbers = range(first, first + count)
    return [f"model-{n:0{digits}}-of-{count:0{digits}}.safetensors" for n in numbers]


def renamed(name: str) -> Change:
    return lambda folder: (folder / WEIGHTS).rename(folder / name)


def linked(target: str) -> Change:
    return lambda folder: (folder / WEIGHTS).symlink_to(target)


def zipped(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02.")

    return change


def cut(size: int) -> Change:
    return lambda folder: os.truncate(folder / WEIGHTS, size)


def quantized(config: Json, **how: Any) -> Change:
    """Weights that are quantised, and what config.json says of that."""

    def change(folder: Path) -> None:
        own = json.loads((folder / CONFIG).read_text())
        network = Model(ModelArgs.from_dict(own))
        network.load_weights(list(arrays(folder).items()))
        nn.quantize(network, **(how or {"group_size": 32, "bits": 4}))
        saved = dict(tree_flatten(network.parameters()))
        mx.eval(saved)
        mx.save_safetensors(str(folder / WEIGHTS), saved, {"format": "mlx"})
        setting(CONFIG, **config)(folder)

    return change


# Tokens


def token(text: str, **flags: bool) -> Json:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": text, **plain, "special": True, **flags}


def bare(*texts: str, folder_config: Json | None = None) -> Change:
    """A tokenizer.json whose added tokens lack these."""

    def strip(found: Json) -> None:
        found["added_tokens"] = [t for t in found["added_tokens"] if t["content"] not in texts]

    return all_of(edited(TOKENIZER, strip), setting(TOKENS, **(folder_config or {})))


def flagged(text: str, **flags: bool) -> Change:
    """A token of tokenizer.json with other flags."""

    def flag(found: Json) -> None:
        for entry in found["added_tokens"]:
            if entry["content"] == text:
                entry.update(flags)

    return edited(TOKENIZER, flag)


def template(text: str) -> Change:
    return setting(TOKENS, chat_template=text)


def untemplated(*changes: Change) -> Change:
    return all_of(without(TOKENS, "chat_template"), *changes)


NEW = "<think>{% for m in messages %}{{ m['content'] }}<think>{% endfor %}"
"""A template that writes a token which the vocabulary has not."""

UNREAD = "mlx-lm fails at a file that is not needed"
MARK = "a byte order mark is no part of a file"
