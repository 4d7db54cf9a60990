"""Converts a Llama model in a GGUF file to a checkpoint folder in the Hugging Face format.

The tokenizer is built here because transformers' GGUF conversion needs torch and does not split
digits.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, TokenType, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from mlx_server.sources.cache import Progress

GgufMetadata = Mapping[str, Any]
"""The metadata of a GGUF file, by key."""

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

SPECIAL = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
}


def convert(gguf: Path, folder: Path, progress: Progress, sampling: Mapping[str, float]) -> None:
    """Writes a Llama GGUF with a SmolLM tokenizer as a checkpoint: weights, configs, tokenizer.

    sampling: the default sampling parameters, for generation_config.json.
    """
    reader = GGUFReader(gguf)
    facts: GgufMetadata = {key: field.contents() for key, field in reader.fields.items()}
    assert facts["general.architecture"] == "llama"
    assert facts["tokenizer.ggml.pre"] == "smollm"
    weights: dict[str, NDArray[np.float16]] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        weights[_name(tensor.name)] = _weight(tensor, facts)
        progress("converting demo:smollm2", done, len(reader.tensors))
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "mlx"})
    shutil.copymode(gguf, file)  # safetensors makes the file readable by its owner only
    (folder / "tokenizer.json").write_text(tokenizer(facts).to_str(), encoding="utf-8")
    ids = {f"{ours}_token_id": facts[key] for ours, key in SPECIAL.items() if ours != "unk"}
    config = _config(facts) | {"tie_word_embeddings": "lm_head.weight" not in weights} | ids
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", ids | {"do_sample": True, **sampling})
    _write(folder / "tokenizer_config.json", _tokenizer_config(facts))


def _name(gguf_name: str) -> str:
    *block, kind, suffix = gguf_name.split(".")
    layer = f"model.layers.{block[1]}." if block else ""
    return f"{layer}{TENSORS[kind]}.{suffix}"


def _weight(tensor: ReaderTensor, facts: GgufMetadata) -> NDArray[np.float16]:
    weight = dequantize(tensor.data, tensor.tensor_type)
    if tensor.name.endswith("attn_q.weight"):
        weight = unpermute(weight, facts["llama.attention.head_count"])
    elif tensor.name.endswith("attn_k.weight"):
        weight = unpermute(weight, facts["llama.attention.head_count_kv"])
    # safetensors writes the buffer as it is in memory and ignores the strides
    return np.ascontiguousarray(weight, dtype=np.float16)


def unpermute(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Restores the row order of a q or k projection.

    llama.cpp applies RoPE to neighbouring rows of a head, so its files interleave them; the
    checkpoint format pairs the first half of a head with the second.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def tokenizer(facts: GgufMetadata) -> Tokenizer:
    """Builds SmolLM's byte-level BPE: control tokens are single ids, digits are split singly."""
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    made = Tokenizer(BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    made.decoder = ByteLevelDecoder()
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    control = [token for token, kind in kinds if kind == TokenType.CONTROL]
    made.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    return made


def _config(facts: GgufMetadata) -> dict[str, Any]:
    heads = facts["llama.attention.head_count"]
    width = facts["llama.embedding_length"]
    epsilon = np.float32(facts["llama.attention.layer_norm_rms_epsilon"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float16",
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "max_position_embeddings": facts["llama.context_length"],
        "rope_theta": facts["llama.rope.freq_base"],
        "rope_scaling": None,
        "rms_norm_eps": float(str(epsilon)),  # 1e-05, without the float32's rounding error
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _tokenizer_config(facts: GgufMetadata) -> dict[str, Any]:
    tokens = facts["tokenizer.ggml.tokens"]
    special = {f"{ours}_token": tokens[facts[key]] for ours, key in SPECIAL.items()}
    return special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": facts["tokenizer.chat_template"],
    }


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
