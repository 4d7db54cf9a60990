"""Malicious checkpoints: what each has done to a good one, and what is to be said of it."""

import json
import os
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Break = Callable[[Path], object]
Zoo = Mapping[str, tuple[Break, str]]

MARK = "evil-ran"
"""A file next to the model's folder that only the model's own code would make."""

EVIL = f"import pathlib\n(pathlib.Path(__file__).parent.parent / '{MARK}').touch()\n"
HUGE = 10**12


class Pickled:
    """Runs code when it is read, as any pickle can."""

    def __init__(self, folder: Path) -> None:
        self._mark = folder.parent / MARK

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self._mark}'",)


def config(**changes: Any) -> Break:
    return changed("config.json", **changes)


def changed(name: str, **changes: Any) -> Break:
    def make(folder: Path) -> None:
        path = folder / name
        found = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**found, **changes}))

    return make


def text(name: str, content: str) -> Break:
    return lambda folder: (folder / name).write_text(content)


def tokenizer(**changes: Any) -> Break:
    return changed("tokenizer.json", **changes)


def template(content: str) -> Break:
    return text("chat_template.jinja", content)


def all_of(*breaks: Break) -> Break:
    return lambda folder: [each(folder) for each in breaks]


def own_code(*names: str) -> Break:
    """Python that wants to be run, named in every way that is known."""
    named = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    return all_of(
        text("evil.py", EVIL),
        text("__init__.py", EVIL),
        config(auto_map=named, trust_remote_code=True),
        changed(
            "tokenizer_config.json",
            auto_map={"AutoTokenizer": ["evil.Tokenizer", None]},
            tokenizer_class="evil.Tokenizer",
            trust_remote_code=True,
        ),
        *(config(**{name: "evil.py"}) for name in names),
    )


def pickles(folder: Path) -> None:
    """In the place of the weights, under all the names that other libraries look for."""
    (folder / "model.safetensors").unlink()
    dumped = pickle.dumps(Pickled(folder))
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.pkl"):
        (folder / name).write_bytes(dumped)
    np.save(folder / "weights.npy", np.array([Pickled(folder)], object), allow_pickle=True)
    np.savez(folder / "weights.npz", a=np.array([Pickled(folder)], object))
    index = {"weight_map": {"lm_head.weight": "pytorch_model.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def pickle_named_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Pickled(folder)))


def link_out(name: str) -> Break:
    def make(folder: Path) -> None:
        outside = folder.parent / f"outside-{name}"
        content = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
        outside.write_bytes(content)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside)

    return make


def linked_shard(folder: Path) -> None:
    outside = folder.parent / "outside-shard"
    (folder / "model.safetensors").rename(outside)
    outside.with_name("keep").write_bytes(b"")
    (folder / "model.safetensors").write_bytes(weights_file({}))
    (folder / "model-2.safetensors").symlink_to("../outside-shard")


def pipe(name: str) -> Break:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def larger(name: str, size: int) -> Break:
    """A file with a hole costs nothing to make, and all of it to read."""

    def make(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.truncate(size)

    return make


def index(*names: str) -> Break:
    files = {f"layer.{i}": name for i, name in enumerate(names)}
    return text("model.safetensors.index.json", json.dumps({"weight_map": files}))


def weights_file(entries: Mapping[str, Any] | str, data: int = 0, length: int = -1) -> bytes:
    header = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    size = len(header) if length < 0 else length
    return struct.pack("<Q", size) + header + bytes(data)


def weights(entries: Mapping[str, Any] | str, data: int = 0, length: int = -1) -> Break:
    content = weights_file(entries, data, length)
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def tensors(change: Callable[[dict[str, Any]], object]) -> Break:
    """The good weights, with something done to them."""

    def make(folder: Path) -> None:
        from safetensors.numpy import load_file, save_file

        path = folder / "model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path, metadata={"format": "mlx"})

    return make


NORM, HEAD = "model.norm.weight", "lm_head.weight"


def fill(name: str, value: float) -> Callable[[dict[str, Any]], object]:
    return lambda found: found.update({name: np.full_like(found[name], value)})


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def normalized(*steps: Mapping[str, Any]) -> Break:
    sequence = {"type": "Sequence", "normalizers": list(steps)}
    return tokenizer(normalizer=sequence)


def decoded(*steps: Mapping[str, Any]) -> Break:
    sequence = {"type": "Sequence", "decoders": list(steps)}
    return tokenizer(decoder=sequence)


def split(pattern: str) -> Break:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return tokenizer(pre_tokenizer={**step, "invert": False})


def added(id: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": "<a>", "special": True, **flags}


def model(**changes: Any) -> Break:
    def make(folder: Path) -> None:
        found = json.loads((folder / "tokenizer.json").read_text())["model"]
        tokenizer(model={**found, **changes})(folder)

    return make


REPLACE = {"type": "Replace", "pattern": {"Regex": "."}, "content": "zz"}
NO_LENGTH = {"type": "FixedLength", "length": 0}
NO_WORDS = {"type": "WordLevel", "vocab": {}, "unk_token": "?"}
DEEP = "[" * 200_000
DEEP_LOOPS = "{% for a in b %}" * 30 + "{% endfor %}" * 30
LINK = "is a link that leads out"
READ_JSON = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
OUT = ("../outside.safetensors", "/etc/passwd", "..", "\0", "x" * 100_000)

REFUSED: Zoo = {
    "pickles for weights": (pickles, r"lacks model\*\.safetensors"),
    "a pickle by another name": (pickle_named_safetensors, r"model\.safetensors .* PyTorch file"),
    **{f"{name} leads out": (link_out(name), f"{name} .* {LINK}") for name in READ_JSON},
    "weights lead out": (link_out("model.safetensors"), rf"model\.safetensors .* {LINK}"),
    "a shard leads out": (linked_shard, rf"model-2\.safetensors .* {LINK}"),
    "a template leads out": (link_out("chat_template.jinja"), f"chat_template.jinja .* {LINK}"),
    "quantisation leads out": (link_out("hf_quant_config.json"), f"hf_quant_config.json .* {LINK}"),
    "a pipe for a shard": (pipe("model-2.safetensors"), r"model-2\.safetensors .* is not a file"),
    "a pipe for a config": (pipe("hf_quant_config.json"), "hf_quant_config.json .* is not a file"),
    "a config of 1 TiB": (larger("config.json", 1 << 40), "config.json .* larger than"),
    "a tokenizer of 1 TiB": (larger("tokenizer.json", 1 << 40), "tokenizer.json .* larger than"),
    "weights cut short": (cut, "cut short"),
    "a header of 2^63 bytes": (weights("{}", length=1 << 63), "header of 9,223,372"),
    "a header that ends early": (weights("{}", length=1000), "cut short"),
    "offsets beyond the file": (weights({"a": entry(shape=[HUGE], offsets=[0, 4 * HUGE])}), "cut"),
    "offsets that overlap": (weights({"a": entry(), "b": entry()}, 8), "overlap"),
    "a tensor twice": (weights('{"a": {"dtype": "F32"}, "a": 1}'), "names 'a' twice"),
    "a negative shape": (
        weights({"a": entry(shape=[-2, -1])}, 8),
        "invalid header entry .* 'a'",
    ),
    "another type than it has": (
        weights({"a": entry("F16")}, 8),
        "invalid header entry .* 'a'",
    ),
    "a type that MLX has not": (weights({"a": entry("F64", [1])}, 8), "F64, which MLX cannot"),
    "a deep header": (weights(DEEP), "not JSON"),
    "10^9 layers": (config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "10^5 kinds": (config(layer_types=["full_attention"] * 10**5), "layer_types is 100000"),
    "10^9 experts": (config(n_routed_experts=10**9), "n_routed_experts is 1000000000"),
    "10^9 blocks": (config(num_blocks=10**9), "num_blocks is 1000000000"),
    "10^9 loops": (config(num_loops=10**9), "num_loops is 1000000000"),
    "deep config.json": (text("config.json", DEEP), "config.json is not valid JSON"),
    "deep tokenizer.json": (text("tokenizer.json", "[" * 10_000), "tokenizer.json of"),
    "a list for a config": (text("config.json", "[]"), "config.json must contain a JSON object"),
    "a number too long": (
        text("config.json", f'{{"a": {"9" * 5000}}}'),
        "config.json is not valid",
    ),
    "a tokenizer without a model": (tokenizer(model=None), "tokenizer.json of"),
    "ids below zero": (model(vocab={"a": -1}), "tokenizer.json of"),
    "merges of nothing": (model(merges=[["zz", "yy"]]), "tokenizer.json of"),
    "a prefix longer than its tokens": (
        model(continuing_subword_prefix="zzzzzz", vocab={"!": 0, '"': 1, '!"': 2}, merges=['! "']),
        "tokenizer.json of",
    ),
    "a tokenizer that panics": (
        tokenizer(pre_tokenizer=NO_LENGTH),
        "tokenizer.json .* chunk size",
    ),
    "words that are unknown": (tokenizer(model=NO_WORDS), "tokenizer.json of"),
    "a pattern without end": (split(r"(?<a>\g<a>)"), "tokenizer.json of .* recursion"),
    "texts that grow": (normalized(*[REPLACE] * 40), "normalizer .* many times longer"),
    "tokens that grow": (decoded(*[REPLACE] * 40), "decoder .* many times longer"),
    "a template nested too deeply": (template(DEEP_LOOPS), "can't be compiled"),
    "a template of 2 MiB": (template("{{ a }}" * 300_000), "chat_template.jinja"),
    "a template of 2 MiB in a config": (
        changed("tokenizer_config.json", chat_template="{{ a }}" * 300_000),
        "more than 1048576 characters",
    ),
    "a number in a template": (template("{{ 1" + "0" * 5000 + " }}"), "compiled"),
    "an import that is none": (template("{% import %}"), "can't be compiled"),
    "a model's own code": (own_code("model_file"), "which mlx-server never runs"),
    "a type that is a path": (config(model_type="../../evil"), "does not support its model type"),
    "a type that is a module": (config(model_type="..os"), "does not support its model type"),
    "a type of 300 letters": (config(model_type="a" * 300), "does not support its model type"),
}
"""By the server, before the engine hears of them."""

UNLOADABLE: Zoo = {
    "10^12 tokens": (config(vocab_size=HUGE), "outside the supported range"),
    "2^31 - 1 tokens": (config(vocab_size=2**31 - 1), "config.json it should have"),
    "a width of 10^12": (config(hidden_size=HUGE), "outside the supported range"),
    "no heads": (config(num_attention_heads=0), "ZeroDivision"),
    "heads below zero": (config(num_attention_heads=-4), "Negative dimensions"),
    "no key heads": (config(num_key_value_heads=0), "config.json it should have"),
    "a text for a number": (config(rope_theta="x"), "rope"),
    "a norm of NaN": (config(rms_norm_eps=float("nan")), "`rms_norm_eps` in config.json is 'nan'"),
    "no quantisation": (config(quantization="x"), "`quantization` in config.json is 'x'"),
    "layers that are not there": (config(num_hidden_layers=3), "lack 9 tensors"),
    "layers too many": (config(num_hidden_layers=1), "mlx-lm's model lacks"),
    "a tensor missing": (tensors(lambda found: found.pop(NORM)), f"lack 1 tensors.*{NORM}"),
    "a stranger": (tensors(lambda t: t.update({"../x": t[NORM]})), r"lacks, such as \.\./x"),
    "another shape": (tensors(lambda t: t.update({NORM: t[NORM][1:]})), f"{NORM} has the shape"),
}
"""By the engine, which alone knows what is in the model."""

UNANSWERING: Zoo = {
    "weights that are NaN": (tensors(fill(NORM, float("nan"))), "NaN or infinity"),
    "weights that are infinite": (tensors(fill(HEAD, float("inf"))), "NaN or infinity"),
}
"""They load; their numbers are none."""

HARMLESS: Mapping[str, Break] = {
    "an index of anything": index(*OUT),
    "code that nobody runs": own_code(),
    "files that nobody reads": all_of(link_out("vocab.json"), text("adapter_model.bin", "cos\n")),
    "names of other files": all_of(
        changed("generation_config.json", transformers_version="../../x", _from_model_config="/x"),
        changed(
            "tokenizer_config.json",
            tokenizer_file="/etc/passwd",
            vocab_file="../../etc/passwd",
            name_or_path="/etc",
            chat_template=[
                {"name": "default", "template": "{{ messages[0].content }}"},
                {"name": "../../etc/passwd", "template": "{% include '/etc/passwd' %}"},
            ],
        ),
        config(_name_or_path="/etc", base_model="../..", tokenizer_file="/etc/passwd"),
    ),
    "ids that are far out": all_of(
        tokenizer(added_tokens=[added(2**31)]),
        changed("tokenizer_config.json", bos_token=None, eos_token=None, pad_token=None),
    ),
    "an index leads out": index("../../model.safetensors"),
    "deep generation_config.json": text("generation_config.json", DEEP),
}
"""What they name is not looked at."""
