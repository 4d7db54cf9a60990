"""Changes that make a checkpoint's folder as odd as those that people have."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
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
TOKENIZER, INDEX = "tokenizer.json", "model.safetensors.index.json"
BOM = b"\xef\xbb\xbf"


def put(name: str, content: bytes | str | object) -> Change:
    """A file with these bytes, this text, or this as JSON."""

    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, bytes | str) else json.dumps(content)
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)

    return change


def put_bytes(name: str, latin: str) -> Change:
    return put(name, latin.encode("latin-1"))


def zeros(name: str, count: int) -> Change:
    return put(name, bytes(count))


def macos_marks() -> Change:
    return lambda folder: [put(f"._{f.name}", b"\0\5\x16\7")(folder) for f in folder.iterdir()]


def gone(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def edited(name: str, edit: Callable[[Json], object]) -> Change:
    """A file of JSON, changed in place."""

    def change(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        edit(found)
        put(name, found)(folder)

    return change


def setting(name: str, values: Json) -> Change:
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


def rename(name: str, other: str) -> Change:
    return lambda folder: (folder / name).rename(folder / other)


def copy(name: str, other: str) -> Change:
    return lambda folder: shutil.copy(folder / name, folder / other)


def link(name: str, target: str) -> Change:
    return lambda folder: (folder / name).symlink_to(target)


def folder(name: str) -> Change:
    return lambda folder: (folder / name).mkdir()


def zipped(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02.")

    return change


def cut(name: str, size: int) -> Change:
    return lambda folder: os.truncate(folder / name, size)


def quantized(config: Json, how: Json | None = None) -> Change:
    """Weights that are quantised, and what config.json says of that."""

    def change(folder: Path) -> None:
        own = json.loads((folder / CONFIG).read_text())
        network = Model(ModelArgs.from_dict(own))
        network.load_weights(list(arrays(folder).items()))
        nn.quantize(network, **(how or {"group_size": 32, "bits": 4}))
        saved = dict(tree_flatten(network.parameters()))
        mx.eval(saved)
        mx.save_safetensors(str(folder / WEIGHTS), saved, {"format": "mlx"})
        setting(CONFIG, config)(folder)

    return change


# Tokens


def bare(*texts: str) -> Change:
    """A tokenizer.json whose added tokens lack these."""

    def strip(found: Json) -> None:
        found["added_tokens"] = [t for t in found["added_tokens"] if t["content"] not in texts]

    return edited(TOKENIZER, strip)


def added(token: Json) -> Change:
    return edited(TOKENIZER, lambda found: found["added_tokens"].append(token))


def flagged(text: str, flags: Json) -> Change:
    """A token of tokenizer.json with other flags."""

    def flag(found: Json) -> None:
        for entry in found["added_tokens"]:
            if entry["content"] == text:
                entry.update(flags)

    return edited(TOKENIZER, flag)


CHANGES: dict[str, Callable[..., Change]] = {
    change.__name__: change
    for change in (
        *(put, put_bytes, zeros, macos_marks, gone, setting, without, marked, rename, copy, link),
        *(folder, shards, index, zipped, cut, quantized, bare, added, flagged),
    )
}


def make_odd(path: Path, changes: list[Any]) -> None:
    """Each change is a list of its name and arguments; CHATML stands for the template so named."""
    chatml = json.dumps(CHAT_TEMPLATE)[1:-1]
    for name, *arguments in json.loads(json.dumps(changes).replace("CHATML", chatml)):
        CHANGES[name](*arguments)(path)
