"""Folders whose weights, configs or tokenizer are odd."""

import math
import os
import shutil
import struct
from collections.abc import Mapping

from tests.pool.odd_changes import (
    ADDED,
    CONFIG,
    GENERATION,
    INDEX,
    JINJA,
    LEGACY,
    LFS,
    MAP,
    MARK,
    PAGE,
    TOKENIZER,
    TOKENS,
    UNREAD,
    WEIGHTS,
    XML,
    Odd,
    all_of,
    cut,
    gone,
    index,
    linked,
    marked,
    put,
    quantized,
    renamed,
    series,
    setting,
    shards,
    without,
    zipped,
)
from tests.tiny import CHAT_TEMPLATE, IM_END

JSON_SLIPS: Mapping[str, bytes] = {
    "a comma too many": b'{"eos_token_id": 2,}',
    "a comment": b'{\n// the end\n"eos_token_id": 2}',
    "half of it": b'{"eos_token_id": [2',
    "true as in Python": b'{"do_sample": True}',
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 1024,
}
OPTIONAL = "a damaged file that is optional gives a warning"

STALE: Mapping[str, Odd] = {
    "whole, index of 2": Odd(index(*series(2))),
    "4 shards, index of 13": Odd(all_of(shards(*series(4)), index(*series(13)))),
    "whole, index of it and a shard": Odd(index(WEIGHTS, series(2)[1])),
    "index of nothing": Odd(put(INDEX, "{}")),
    "index without JSON": Odd(put(INDEX, "not JSON")),
    "index of files elsewhere": Odd(index("../other.safetensors", "/etc/passwd", "model/x")),
    "index of pickles": Odd(index("pytorch_model-00001-of-00002.bin")),
    "index is a pointer": Odd(put(INDEX, LFS)),
    "index is a link out": Odd(lambda folder: (folder / INDEX).symlink_to("/etc/hosts")),
    "index and no weights": Odd(all_of(gone(WEIGHTS), index(*series(2))), r"lacks model\*"),
    "shards from 0": Odd(shards(*series(3, first=0))),
    "shards of a name of their own": Odd(shards("model_a.safetensors", "model-b.safetensors")),
    "one shard alone": Odd(shards(series(1)[0])),
    "one of three is missing": Odd(
        shards(series(3)[0], "", series(3)[2]), "lacks model-00002-of-00003"
    ),
    "two series, one of them whole": Odd(
        all_of(
            lambda folder: shutil.copy(folder / WEIGHTS, folder / series(4)[0]), shards(*series(2))
        )
    ),
    "a mark of macOS for each file": Odd(
        lambda folder: [put(f"._{file.name}", b"\0\5\x16\7")(folder) for file in folder.iterdir()]
    ),
    "downloads that are not finished": Odd(
        all_of(
            put("model-00002-of-00002.safetensors.crdownload", b"x"),
            put("model.safetensors.incomplete", b"x"),
            put("model.safetensors.part", b"x"),
        )
    ),
    "leftovers of training": Odd(
        all_of(put("optimizer.safetensors", b"x"), put("training_args.bin", b"\x80\2."))
    ),
    "weights behind a link in the folder": Odd(all_of(renamed("blob"), linked("blob"))),
    "a shard that is a link to nowhere": Odd(
        lambda folder: (folder / series(1)[0]).symlink_to("nowhere"), "is not a file"
    ),
    "a folder for a shard": Odd(
        lambda folder: (folder / "model-extra.safetensors").mkdir(), "is not a file"
    ),
    "an adapter in the folder": Odd(put("adapters.safetensors", b"\0")),
    "consolidated alone": Odd(renamed("consolidated.safetensors"), r"lacks model\*"),
    "pytorch_model.bin": Odd(zipped("pytorch_model.bin"), r"lacks model\*.*pytorch_model\.bin"),
    "a GGUF": Odd(all_of(gone(WEIGHTS), put("m.gguf", b"GGUF")), r"lacks model\*.*m\.gguf"),
}

SLIPS: Mapping[str, Odd] = {
    **{f"{GENERATION}: {name}": Odd(put(GENERATION, text)) for name, text in JSON_SLIPS.items()},
    f"{GENERATION}: a list": Odd(put(GENERATION, "[]"), differs=UNREAD),
    f"{GENERATION}: Latin-1": Odd(put(GENERATION, b'{"a": "\xe9"}'), differs=UNREAD),
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
    f"{TOKENS}: a mark": Odd(marked(TOKENS), differs=MARK),
    f"{TOKENS}: none": Odd(all_of(put(JINJA, CHAT_TEMPLATE), gone(TOKENS))),
    f"{MAP}: a comma too many": Odd(
        all_of(without(TOKENS, "added_tokens_decoder"), put(MAP, '{"eos_token": "<|im_end|>",}')),
        differs=OPTIONAL,
    ),
    f"{ADDED}: a comment": Odd(put(ADDED, b"{} // none"), differs=OPTIONAL),
    f"{LEGACY}: a comma too many": Odd(put(LEGACY, "{,}")),
    f"{CONFIG}: a mark": Odd(marked(CONFIG), differs=MARK),
    f"{CONFIG}: a comma too many": Odd(put(CONFIG, '{"a": 1,}'), r"config\.json is not valid JSON"),
    f"{CONFIG}: a list": Odd(put(CONFIG, "[]"), r"config\.json must contain a JSON object"),
    f"{CONFIG}: a page": Odd(put(CONFIG, PAGE), r"config\.json is a web page"),
    f"{CONFIG}: no model_type": Odd(without(CONFIG, "model_type"), "has no `model_type`"),
    f"{CONFIG}: no architectures": Odd(without(CONFIG, "architectures")),
    f"{CONFIG}: code of its own": Odd(setting(CONFIG, auto_map={"AutoModel": "evil.Model"})),
    f"{CONFIG}: a file of code": Odd(setting(CONFIG, model_file="evil.py"), "needs code of its"),
    f"{CONFIG}: the name of its twin": Odd(
        setting(CONFIG, model_type="mistral", architectures=["MistralForCausalLM"])
    ),
    f"{CONFIG}: old scaling": Odd(setting(CONFIG, rope_scaling={"type": "linear", "factor": 2.0})),
    f"{CONFIG}: a context with a point": Odd(
        setting(CONFIG, max_position_embeddings=2048.0), differs=UNREAD
    ),
    **{
        f"{CONFIG}: {key} is {value!r:.20}": Odd(
            setting(CONFIG, **{key: value}), rf"{key}` in config\.json is '.*whole number"
        )
        for key in ("num_hidden_layers", "hidden_size")
        for value in (2.0, "2", -2, 0, None, [2])
    },
    **{  # mlx-lm multiplies a list by it: with less it may be given the memory of the machine
        f"{CONFIG}: {key} is huge": Odd(
            setting(CONFIG, **{key: 10**18}), rf"{key}.* is '?1000000000000"
        )
        for key in ("num_hidden_layers", "hidden_size")
    },
    **{
        f"{CONFIG}: {key} is {value!r:.20}": Odd(
            setting(CONFIG, **{key: value}), rf"{key}` in config\.json is .*a number above zero"
        )
        for key in ("rms_norm_eps", "rope_theta")
        for value in ("1e-5", None, [1], 10**400)
    },
    **{
        f"{CONFIG}: {key} is {value!r} ({kind})": Odd(
            setting(CONFIG, rope_scaling=scaling, **{key: value}),
            rf"{key}` in config\.json is '{value}'.*a number above zero",
            differs="mlx_lm loads it, and computes NaN" * (key == "rope_theta"),
        )
        for key in ("rms_norm_eps", "rope_theta")
        for value in (0, -1.0)
        for kind, scaling in (("plain", None), ("llama3", LLAMA3))
    },
    f"{CONFIG}: rope_theta is infinite": Odd(
        setting(CONFIG, rope_theta=math.inf), "rope_theta` in config", differs="as above"
    ),
    f"{CONFIG}: an end as text": Odd(setting(CONFIG, eos_token_id="2"), differs=UNREAD),
    f"{CONFIG}: tagged floats": Odd(setting(CONFIG, limit={"__float__": "Infinity"})),
    f"{TOKENIZER}: a mark": Odd(marked(TOKENIZER), differs=MARK),
}

NO_FILES: Mapping[str, Odd] = {
    "weights: a pointer": Odd(put(WEIGHTS, LFS), "is a Git LFS pointer.*Run `git lfs pull`"),
    "weights: a page": Odd(put(WEIGHTS, PAGE), "is a web page"),
    "weights: an error": Odd(put(WEIGHTS, XML), "is an error that a server sent as XML"),
    "weights: nothing": Odd(put(WEIGHTS, b""), "is empty. Download it again"),
    "weights: zeros": Odd(put(WEIGHTS, bytes(4096)), "begins with zeros"),
    "weights: cut": Odd(cut(100_000), "is cut short"),
    "weights: of PyTorch": Odd(
        all_of(zipped("x"), lambda folder: (folder / "x").rename(folder / WEIGHTS)),
        "is a PyTorch file",
    ),
    "weights: a GGUF": Odd(put(WEIGHTS, b"GGUF\x03\0\0\0" + bytes(64)), "is a GGUF file"),
    "weights: noise": Odd(put(WEIGHTS, struct.pack("<Q", 1 << 62) + b"\xff" * 64), "header of"),
    "one shard: a pointer": Odd(
        all_of(shards(*series(2)), put(series(2)[1], LFS)), "00002.* is a Git LFS pointer"
    ),
    "tokenizer: a pointer": Odd(put(TOKENIZER, LFS), r"tokenizer\.json is a Git LFS pointer"),
    "tokenizer: half": Odd(
        lambda folder: os.truncate(folder / TOKENIZER, 2000), r"tokenizer\.json of this model can't"
    ),
    "tokenizer.model: a pointer": Odd(
        all_of(gone(TOKENIZER), put("tokenizer.model", LFS)), r"tokenizer\.model is a Git LFS"
    ),
}

HOW = {"group_size": 32, "bits": 4}
OWN, OF_OTHERS = "quantization", "quantization_config"
MX = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
QUANTIZED: Mapping[str, Odd] = {
    "both keys": Odd(quantized({OWN: HOW, OF_OTHERS: HOW})),
    "its own key": Odd(quantized({OWN: HOW})),
    "the key of others": Odd(quantized({OF_OTHERS: HOW}), differs="it says all that is to be said"),
    "mxfp4 by its own key": Odd(quantized({OWN: MX}, **MX)),
    "mxfp4 by the key of others": Odd(quantized({OF_OTHERS: {"quant_method": "mxfp4"}}, **MX)),
    "a layer of its own": Odd(
        quantized({OWN: {**HOW, "model.layers.0.self_attn.q_proj": HOW, "lm_head": HOW}})
    ),
    "bits that differ by layer, and are not listed": Odd(
        all_of(quantized({OWN: {"group_size": 64, "bits": 8}}), setting(CONFIG, quantization=MX))
    ),
    "no key": Odd(quantized({}), r"quantised, and config\.json has no `quantization`"),
    "no bits": Odd(quantized({OWN: {"group_size": 32}}), "`quantization` in .* lacks `bits`"),
    "a number": Odd(quantized({OWN: 4}), "`quantization` in .* is '4'; mlx-lm reads an object"),
    "a layer of half a bit": Odd(
        quantized({OWN: {**HOW, "lm_head": {"group_size": 32, "bits": 2.5}}}),
        r"`quantization\.lm_head\.bits` in .* is '2\.5'; mlx-lm reads one of 2, 3",
    ),
    "a layer of an unknown mode": Odd(
        quantized({OWN: {**HOW, "lm_head": {**HOW, "mode": "q4_k"}}}), r"lm_head\.mode.*'q4_k'"
    ),
    "AWQ that is left over": Odd(
        setting(CONFIG, quantization_config={"quant_method": "awq", "bits": 4}),
        r"'awq'\): no tensor is packed so",
    ),
    "AWQ of weights that mlx-lm quantised": Odd(
        quantized({OF_OTHERS: {"quant_method": "gptq", "bits": 4}}), r"'gptq'\): no tensor"
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
    "fp8 that is left over": Odd(
        setting(CONFIG, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    ),
}
