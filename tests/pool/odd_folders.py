"""Checkpoints as people have them: what each has done to a good folder, and what is said of it."""

import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

from tests.tiny import CHAT_TEMPLATE, IM_END

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

JSON_SLIPS: Mapping[str, bytes] = {
    "a comma too many": b'{"eos_token_id": 2,}',
    "nothing": b"",
    "a comment": b'{\n// the end\n"eos_token_id": 2}',
    "single quotes": b"{'eos_token_id': 2}",
    "half of it": b'{"eos_token_id": [2',
    "two objects": b'{"eos_token_id": 2}{"eos_token_id": 2}',
    "true as in Python": b'{"do_sample": True}',
}
OPTIONAL = "a damaged file that is optional gives a warning"
UNREAD = "mlx-lm fails at a file that is not needed"

STALE: Mapping[str, Odd] = {
    "whole, index of 2": Odd(index(*series(2))),
    "4 shards, index of 13": Odd(all_of(shards(*series(4)), index(*series(13)))),
    "2 shards, index of 5": Odd(all_of(shards(*series(2)), index(*series(5)))),
    "2 shards, index of a whole": Odd(all_of(shards(*series(2)), index(WEIGHTS))),
    "whole, index of it and a shard": Odd(index(WEIGHTS, series(2)[1])),
    "index of nothing": Odd(put(INDEX, "{}")),
    "index without JSON": Odd(put(INDEX, "not JSON")),
    "index of zero bytes": Odd(put(INDEX, b"")),
    "index of files elsewhere": Odd(index("../other.safetensors", "/etc/passwd", "model/x")),
    "index of pickles": Odd(index("pytorch_model-00001-of-00002.bin")),
    "index with a null map": Odd(put(INDEX, {"weight_map": None})),
    "index is a pointer": Odd(put(INDEX, LFS)),
    "index is a folder": Odd(lambda folder: (folder / INDEX).mkdir()),
    "index is a link out": Odd(lambda folder: (folder / INDEX).symlink_to("/etc/hosts")),
    "index and no weights": Odd(all_of(gone(WEIGHTS), index(*series(2))), r"lacks model\*"),
    "shards from 0": Odd(shards(*series(3, first=0))),
    "shards with six digits": Odd(shards(*series(3, digits=6))),
    "shards of a name of their own": Odd(shards("model_a.safetensors", "model-b.safetensors")),
    "one shard alone": Odd(shards(series(1)[0])),
    "one of three is missing": Odd(
        shards(series(3)[0], "", series(3)[2]), "lacks model-00002-of-00003"
    ),
    "whole, and a shard of an older copy": Odd(
        lambda folder: shutil.copy(folder / WEIGHTS, folder / series(2)[0])
    ),
    "two series, one of them whole": Odd(
        all_of(
            lambda folder: shutil.copy(folder / WEIGHTS, folder / series(4)[0]), shards(*series(2))
        )
    ),
    "an adapter in the folder": Odd(put("adapters.safetensors", b"\0")),
    "consolidated next to it": Odd(put("consolidated.safetensors", LFS)),
    "consolidated alone": Odd(renamed("consolidated.safetensors"), r"lacks model\*"),
    "pytorch_model.safetensors": Odd(renamed("pytorch_model.safetensors"), r"lacks model\*"),
    "weights.npz": Odd(zipped("weights.npz"), r"lacks model\*"),
    "pytorch_model.bin": Odd(zipped("pytorch_model.bin"), r"lacks model\*.*pytorch_model\.bin"),
    "a GGUF": Odd(all_of(gone(WEIGHTS), put("m.gguf", b"GGUF")), r"lacks model\*.*m\.gguf"),
}

SLIPS: Mapping[str, Odd] = {
    **{f"{GENERATION}: {name}": Odd(put(GENERATION, text)) for name, text in JSON_SLIPS.items()},
    f"{GENERATION}: a mark": Odd(marked(GENERATION)),
    f"{GENERATION}: a list": Odd(put(GENERATION, "[]"), differs=UNREAD),
    f"{GENERATION}: null": Odd(put(GENERATION, "null"), differs=UNREAD),
    f"{GENERATION}: Latin-1": Odd(put(GENERATION, b'{"a": "\xe9"}'), differs=UNREAD),
    f"{GENERATION}: a page": Odd(put(GENERATION, PAGE)),
    f"{GENERATION}: odd values": Odd(
        put(
            GENERATION,
            {
                "temperature": "0.7",
                "top_p": [0.9],
                "top_k": None,
                "min_p": {},
                "do_sample": "yes",
                "repetition_penalty": True,
                "eos_token_id": [IM_END, 0],
            },
        )
    ),
    f"{GENERATION}: temperature 0": Odd(put(GENERATION, {"temperature": 0, "top_p": 0})),
    f"{GENERATION}: NaN": Odd(put(GENERATION, '{"temperature": NaN, "top_k": Infinity}')),
    f"{GENERATION}: ends in ends": Odd(
        put(GENERATION, {"eos_token_id": [[IM_END]]}), differs=UNREAD
    ),
    **{
        f"{TOKENS}: {name}": Odd(
            all_of(put(JINJA, CHAT_TEMPLATE), put(TOKENS, text)), differs=OPTIONAL
        )
        for name, text in JSON_SLIPS.items()
    },
    f"{TOKENS}: a mark": Odd(marked(TOKENS), differs="a mark is no part of a file"),
    f"{TOKENS}: none": Odd(all_of(put(JINJA, CHAT_TEMPLATE), gone(TOKENS))),
    f"{MAP}: a comma too many": Odd(
        all_of(without(TOKENS, "added_tokens_decoder"), put(MAP, '{"eos_token": "<|im_end|>",}')),
        differs=OPTIONAL,
    ),
    f"{ADDED}: a comment": Odd(put(ADDED, b"{} // none"), differs=OPTIONAL),
    "preprocessor_config.json: a comma too many": Odd(put("preprocessor_config.json", "{,}")),
    "processor_config.json: a comma too many": Odd(put("processor_config.json", "{,}")),
    f"{LEGACY}: a comma too many": Odd(put(LEGACY, "{,}")),
    "quantize_config.json: no JSON": Odd(put("quantize_config.json", "?")),
    f"{CONFIG}: a mark": Odd(marked(CONFIG), differs="a mark is no part of a file"),
    f"{CONFIG}: a comma too many": Odd(put(CONFIG, '{"a": 1,}'), r"config\.json is not valid JSON"),
    f"{CONFIG}: nothing": Odd(put(CONFIG, b""), r"config\.json is empty"),
    f"{CONFIG}: a list": Odd(put(CONFIG, "[]"), r"config\.json must contain a JSON object"),
    f"{CONFIG}: a page": Odd(put(CONFIG, PAGE), r"config\.json is a web page"),
    f"{CONFIG}: a pointer": Odd(put(CONFIG, LFS), r"config\.json is a Git LFS pointer"),
    f"{CONFIG}: tagged floats": Odd(setting(CONFIG, limit={"__float__": "Infinity"})),
    f"{TOKENIZER}: a mark": Odd(marked(TOKENIZER), differs="a mark is no part of a file"),
}

TOKEN_FILES: Mapping[str, Odd] = {
    "listed in the config": Odd(
        bare(END, folder_config={"added_tokens_decoder": {"2": token(END)}})
    ),
    "both listed in the config": Odd(
        bare(
            START,
            END,
            folder_config={"added_tokens_decoder": {"1": token(START), "2": token(END)}},
        )
    ),
    "in added_tokens.json": Odd(all_of(bare(START), put(ADDED, {START: 1}))),
    "the end, in added_tokens.json": Odd(all_of(bare(END), put(ADDED, {END: 2}))),
    "an end in the map": Odd(
        all_of(bare(END), without(TOKENS, "eos_token"), put(MAP, {"eos_token": token(END)}))
    ),
    "an end in the map, as text": Odd(
        all_of(bare(END), without(TOKENS, "eos_token"), put(MAP, {"eos_token": END}))
    ),
    "a map that is not asked": Odd(
        all_of(
            bare(START, folder_config={"added_tokens_decoder": {"2": token(END)}}),
            without(TOKENS, "bos_token"),
            put(MAP, {"bos_token": START}),
        )
    ),
    "extra tokens": Odd(all_of(bare(START), setting(TOKENS, extra_special_tokens=[START]))),
    "additional tokens": Odd(
        all_of(bare(START), setting(TOKENS, additional_special_tokens=[START]))
    ),
    "additional tokens of the map": Odd(
        all_of(bare(START), put(MAP, {"additional_special_tokens": [START]}))
    ),
    "extra tokens of the map": Odd(
        all_of(bare(START), put(MAP, {"extra_special_tokens": [{"content": START}]}))
    ),
    "extra tokens by name": Odd(
        all_of(
            bare(),
            setting(TOKENS, extra_special_tokens={"image_token": "<image>"}),
            template("{{ image_token }}" + CHAT_TEMPLATE),
        )
    ),
    "a token of its own name": Odd(
        all_of(
            setting(TOKENS, image_token="<image>"), template("{{ image_token }}" + CHAT_TEMPLATE)
        )
    ),
    "a new token": Odd(
        all_of(setting(TOKENS, added_tokens_decoder={"259": token("<think>")}), template(NEW))
    ),
    "a new token far behind": Odd(
        all_of(setting(TOKENS, added_tokens_decoder={"300": token("<think>")}), template(NEW))
    ),
    "new tokens in another order": Odd(
        all_of(
            setting(
                TOKENS,
                added_tokens_decoder={"310": token("<think>"), "305": token("</think>")},
            ),
            template("</think>" + NEW),
        )
    ),
    "a new token of the map": Odd(
        all_of(template(NEW), put(MAP, {"sep_token": token("<think>", lstrip=True)}))
    ),
    "a new token in added_tokens.json": Odd(all_of(put(ADDED, {"<think>": 259}), template(NEW))),
    "new tokens everywhere": Odd(
        all_of(
            put(ADDED, {"<think>": 261, "<a>": 260}),
            put(MAP, {"additional_special_tokens": ["<b>", "<think>"], "mask_token": "<m>"}),
            template("<a><b><m>" + NEW),
        )
    ),
    "a padding token of its own": Odd(
        all_of(setting(TOKENS, pad_token="[PAD]"), template("[PAD]" + CHAT_TEMPLATE))
    ),
    "a token that takes the space before it": Odd(
        all_of(
            setting(TOKENS, added_tokens_decoder={"1": token(START, lstrip=True)}),
            template("a  " + CHAT_TEMPLATE),
        )
    ),
    "a token that takes the space after it": Odd(
        all_of(
            setting(TOKENS, added_tokens_decoder={"1": token(START, rstrip=True)}),
            template(START + "  a" + CHAT_TEMPLATE),
        )
    ),
    "a token that is a word": Odd(
        all_of(
            setting(TOKENS, added_tokens_decoder={"259": token("ab", single_word=True)}),
            template("ab abc" + CHAT_TEMPLATE),
        )
    ),
    "a listed token that is not special": Odd(
        setting(TOKENS, added_tokens_decoder={"2": token(END, special=False)})
    ),
    "tokens that tokenizer.json says otherwise": Odd(
        all_of(
            flagged(START, lstrip=True, special=False),
            setting(TOKENS, added_tokens_decoder={"1": token(START)}),
            template("a  " + CHAT_TEMPLATE),
        )
    ),
    "a token as an object": Odd(setting(TOKENS, eos_token={"__type": "AddedToken", **token(END)})),
    "a token as an object without a type": Odd(
        setting(TOKENS, eos_token=token(END)), differs="the object says enough"
    ),
    "a token that is null": Odd(setting(TOKENS, bos_token=None, pad_token=None)),
    "listed tokens that are null": Odd(
        setting(TOKENS, added_tokens_decoder={"2": None}), differs=UNREAD
    ),
    "listed tokens that are a list": Odd(
        setting(TOKENS, added_tokens_decoder=[token(END)]), differs=UNREAD
    ),
    "an empty list of tokens": Odd(
        all_of(bare(START), setting(TOKENS, added_tokens_decoder={}), put(ADDED, {START: 1}))
    ),
    "a class that is unknown": Odd(setting(TOKENS, tokenizer_class="NoSuchTokenizer")),
    "no class": Odd(without(TOKENS, "tokenizer_class")),
    "code for a tokenizer": Odd(
        setting(TOKENS, auto_map={"AutoTokenizer": ["evil.Slow", "evil.Fast"]}),
    ),
}

TEMPLATES: Mapping[str, Odd] = {
    "a file": Odd(untemplated(put(JINJA, OTHER))),
    "a file before the config": Odd(put(JINJA, OTHER)),
    "a file with a mark": Odd(
        put(JINJA, BOM + CHAT_TEMPLATE.encode()), differs="a mark is no part of a file"
    ),
    "a file with line ends of Windows": Odd(put(JINJA, OTHER.replace("\n", "\r\n"))),
    "a file of nothing": Odd(put(JINJA, b""), differs="an empty template shows no message"),
    "a list": Odd(template([{"name": "default", "template": OTHER}])),  # type: ignore[arg-type]
    "a list with one for tools": Odd(
        setting(
            TOKENS,
            chat_template=[
                {"name": "default", "template": OTHER},
                {"name": "tool_use", "template": FOR_TOOLS},
            ],
        )
    ),
    "an object": Odd(setting(TOKENS, chat_template={"default": OTHER})),
    "an object with one for tools": Odd(
        setting(TOKENS, chat_template={"default": OTHER, "tool_use": FOR_TOOLS})
    ),
    "one by another name": Odd(
        setting(TOKENS, chat_template=[{"name": "chatml", "template": OTHER}]),
        differs="a single template is the default",
    ),
    "a file before a list": Odd(
        all_of(
            setting(TOKENS, chat_template={"default": MINE, "tool_use": FOR_TOOLS}),
            put(JINJA, OTHER),
        )
    ),
    "a file, and one for tools": Odd(
        untemplated(put(JINJA, OTHER), put(f"{MORE}/tool_use.jinja", FOR_TOOLS))
    ),
    "a file, and one that is not used": Odd(
        untemplated(put(JINJA, OTHER), put(f"{MORE}/rag.jinja", MINE))
    ),
    "both in the folder": Odd(
        untemplated(put(f"{MORE}/default.jinja", OTHER), put(f"{MORE}/tool_use.jinja", FOR_TOOLS))
    ),
    "the folder before the file": Odd(
        untemplated(put(JINJA, MINE), put(f"{MORE}/default.jinja", OTHER))
    ),
    "only one for tools in the folder": Odd(
        put(f"{MORE}/tool_use.jinja", FOR_TOOLS), differs="the config has the default one"
    ),
    "chat_template.json": Odd(
        untemplated(put(LEGACY, {"chat_template": OTHER})),
        differs="transformers reads it for images only",
    ),
    "chat_template.json after the config": Odd(put(LEGACY, {"chat_template": MINE})),
    "chat_template.json after a file": Odd(
        untemplated(put(JINJA, OTHER), put(LEGACY, {"chat_template": MINE}))
    ),
    "processor_config.json": Odd(
        untemplated(put("processor_config.json", {"chat_template": OTHER})),
        differs="transformers reads it for images only",
    ),
    "none": Odd(untemplated(), "has no chat template"),
    "none by default": Odd(
        setting(TOKENS, chat_template={"rag": MINE, "code": OTHER}), "has no chat template"
    ),
    "one that can't be compiled": Odd(template("{% if %}"), "can't be compiled"),
    "a mark for training": Odd(
        template(
            CHAT_TEMPLATE.replace("{%- endfor", "{% generation %}x{% endgeneration %}{%- endfor")
        )
    ),
}

NO_FILES: Mapping[str, Odd] = {
    "weights: a pointer": Odd(put(WEIGHTS, LFS), "is a Git LFS pointer.*Run `git lfs pull`"),
    "weights: a page": Odd(put(WEIGHTS, PAGE), "is a web page"),
    "weights: an error": Odd(put(WEIGHTS, XML), "is an error that a server sent as XML"),
    "weights: a sentence": Odd(
        put(WEIGHTS, "Invalid username or password."), "text that begins with 'Invalid username"
    ),
    "weights: JSON": Odd(put(WEIGHTS, '{"error": "gated"}'), "is text that begins with"),
    "weights: nothing": Odd(put(WEIGHTS, b""), "is empty. Download it again"),
    "weights: zeros": Odd(put(WEIGHTS, bytes(4096)), "begins with zeros"),
    "weights: cut": Odd(cut(100_000), "is cut short"),
    "weights: cut in the header": Odd(cut(100), "is cut short"),
    "weights: a pickle": Odd(put(WEIGHTS, pickle.dumps({"a": 1})), "is a PyTorch file"),
    "weights: of PyTorch": Odd(
        all_of(zipped("x"), renamed_x := lambda f: (f / "x").rename(f / WEIGHTS)),
        "is a PyTorch file",
    ),
    "weights: a GGUF": Odd(put(WEIGHTS, b"GGUF\x03\0\0\0" + bytes(64)), "is a GGUF file"),
    "weights: packed": Odd(put(WEIGHTS, b"\x1f\x8b\x08\0" + bytes(64)), "is an archive"),
    "weights: noise": Odd(put(WEIGHTS, struct.pack("<Q", 1 << 62) + b"\xff" * 64), "header of"),
    "one shard: a pointer": Odd(
        all_of(shards(*series(2)), put(series(2)[1], LFS)), "00002.* is a Git LFS pointer"
    ),
    "tokenizer: a pointer": Odd(put(TOKENIZER, LFS), r"tokenizer\.json is a Git LFS pointer"),
    "tokenizer: a page": Odd(put(TOKENIZER, PAGE), r"tokenizer\.json is a web page"),
    "tokenizer: nothing": Odd(put(TOKENIZER, b""), r"tokenizer\.json is empty"),
    "tokenizer: half": Odd(
        lambda folder: os.truncate(folder / TOKENIZER, 2000), r"tokenizer\.json of this model can't"
    ),
    "tokenizer.model: a pointer": Odd(
        all_of(gone(TOKENIZER), put("tokenizer.model", LFS)), r"tokenizer\.model is a Git LFS"
    ),
    "tiktoken.model: a page": Odd(
        all_of(
            gone(TOKENIZER),
            put("tiktoken.model", PAGE),
            setting(TOKENS, tokenizer_class="TikTokenTokenizer"),
        ),
        r"tiktoken\.model is a web page",
    ),
}

HOW = {"group_size": 32, "bits": 4}
OWN, OF_OTHERS = "quantization", "quantization_config"
MX = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
QUANTIZED: Mapping[str, Odd] = {
    "both keys": Odd(quantized({OWN: HOW, OF_OTHERS: HOW})),
    "its own key": Odd(quantized({OWN: HOW})),
    "its own key, of other bits": Odd(quantized({OWN: {"group_size": 64, "bits": 8}})),
    "the key of others": Odd(quantized({OF_OTHERS: HOW}), differs="it says all that is to be said"),
    "mxfp4 by its own key": Odd(quantized({OWN: MX}, **MX)),
    "mxfp4 by the key of others": Odd(quantized({OF_OTHERS: {"quant_method": "mxfp4"}}, **MX)),
    "a layer of its own": Odd(
        quantized({OWN: {**HOW, "model.layers.0.self_attn.q_proj": HOW, "lm_head": HOW}})
    ),
    "a layer that is none": Odd(quantized({OWN: {**HOW, "model.layers.9.mlp": {"bits": 2.5}}})),
    "no key": Odd(quantized({}), r"quantised, and config\.json has no `quantization`"),
    "no bits": Odd(quantized({OWN: {"group_size": 32}}), "`quantization` in .* lacks `bits`"),
    "a number": Odd(quantized({OWN: 4}), "`quantization` in .* is '4'; mlx-lm reads an object"),
    "a text": Odd(quantized({OWN: "4bit"}), "`quantization` in .* is '4bit'"),
    "a layer of half a bit": Odd(
        quantized({OWN: {**HOW, "lm_head": {"group_size": 32, "bits": 2.5}}}),
        r"`quantization\.lm_head\.bits` in .* is '2\.5'; mlx-lm reads one of 2, 3",
    ),
    "a layer of an unknown mode": Odd(
        quantized({OWN: {**HOW, "lm_head": {**HOW, "mode": "q4_k"}}}), r"lm_head\.mode.*'q4_k'"
    ),
    "null": Odd(quantized({OWN: None, OF_OTHERS: {"quant_method": "mxfp4"}}, **MX)),
    "AWQ that is left over": Odd(
        setting(CONFIG, quantization_config={"quant_method": "awq", "bits": 4}), "'awq'"
    ),
    "GPTQ with 8 bits": Odd(
        setting(CONFIG, quantization_config={"quant_method": "gptq", "bits": 8}), "'gptq'"
    ),
    "bitsandbytes that is left over": Odd(
        setting(CONFIG, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    ),
    "compressed-tensors of an unknown kind": Odd(
        setting(
            CONFIG,
            quantization_config={"quant_method": "compressed-tensors", "format": "float-quantized"},
        ),
        "'compressed-tensors'.*float-quantized",
    ),
    "modelopt in FP8": Odd(
        put("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}),
        "'quant_method'|`quant_method`",
    ),
    "a method that is none": Odd(
        setting(CONFIG, quantization_config={"load_in_8bit": True}), "`quant_method`: 'None'"
    ),
    "a config of others that is empty": Odd(setting(CONFIG, quantization_config={})),
    "a config of others that is a text": Odd(setting(CONFIG, quantization_config="awq"), "'awq'"),
    "fp8 that is left over": Odd(
        setting(CONFIG, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    ),
}

ODD: Mapping[str, Odd] = {
    f"{kind}: {name}": odd
    for kind, table in (
        ("index", STALE),
        ("json", SLIPS),
        ("tokens", TOKEN_FILES),
        ("template", TEMPLATES),
        ("no file", NO_FILES),
        ("quantized", QUANTIZED),
    )
    for name, odd in table.items()
}
