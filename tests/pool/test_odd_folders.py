"""What mlx-lm loads and transformers renders, we load and render alike, however odd the folder."""

import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

from mlx_server.errors import ServerError
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.pool.prepare import ModelSpec, prepare
from mlx_server.worker import weights
from tests.tables import cases
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


TEXT = "Hi  there"
TOOL: dict[str, Any] = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}

Answer = tuple[list[int], list[int], mx.array]
"""The prompt's tokens, those of the prompt with a tool, and the logits after the first."""


def logits(model: Any, prompt: list[int]) -> mx.array:
    known = [token for token in prompt if token < 320]
    found: mx.array = model(mx.array([known]))[0, -1].astype(mx.float32)
    return found


def of_mlx_lm(folder: Path) -> Answer:
    model, tokenizer = mlx_lm.load(str(folder), lazy=True)
    messages = [{"role": "user", "content": TEXT}]
    tool = {"type": "function", "function": TOOL}
    prompts = (
        tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
        for tools in (None, [tool])
    )
    plain, with_tool = map(list, prompts)
    return plain, with_tool, logits(model, plain)


def of_ours(folder: Path) -> Answer:
    prepared = prepare(ModelSpec("odd", str(folder)), lambda *progress: None, upcast=True)
    # a template alone does not describe tools that it has no place for
    family = replace(prepared.family, tools_in_prompt=False)
    model = weights.loaded(prepared.path)
    plain, with_tool = (
        family.render(prepared.checkpoint, Conversation((Message("user", TEXT),), tools)).tokens
        for tools in ((), (Tool(**TOOL),))
    )
    return plain, with_tool, logits(model, plain)


@pytest.mark.slow
@cases
@pytest.mark.filterwarnings("ignore")  # transformers' and mlx-lm's own
def test_an_odd_folder(
    changes: list[Any],
    says: str,
    differs: str,
    tiny_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`says` is what our refusal says; if empty, it loads. `differs` is why we do other than mlx-lm
    does. Sizes that are huge are refused since mlx-lm multiplies a list by them, and might be given
    the memory of the machine."""
    monkeypatch.setenv("MLX_SERVER_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "odd"
    shutil.copytree(tiny_path, folder)
    make_odd(folder, changes)
    theirs: Answer | Exception
    try:
        theirs = of_mlx_lm(folder)
    except Exception as error:
        theirs = error
    if says:
        with pytest.raises(ServerError) as refused:
            of_ours(folder)
        assert re.search(says, refused.value.message), refused.value.message
        assert isinstance(theirs, Exception) != bool(differs)
        return
    ours = of_ours(folder)
    is_alike = not isinstance(theirs, Exception) and same(ours, theirs)
    assert is_alike != bool(differs), (ours, theirs)


def same(ours: Answer, theirs: Answer) -> bool:
    return ours[:2] == theirs[:2] and bool(mx.allclose(ours[2], theirs[2], atol=1e-3))


@pytest.mark.parametrize("name", ["m[4bit]", "m (1)", "a*b?", "ü 漢", "-m"])
def test_a_folder_by_any_name(name: str, tiny_path: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_path, tmp_path / name)
    assert same(of_ours(tmp_path / name), of_ours(tiny_path))
