"""Tiny checkpoints with random weights, as complete as a real one's folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDOFTEXT, IM_START, IM_END = range(3)
TOKENS = len(SPECIAL) + 256

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


def tiny_llama(
    folder: Path, *, seed: int = 0, vocabulary: int = 320, layers: int = 2, hidden: int = 64
) -> Path:
    """Writes a checkpoint of mlx-lm's own llama code into `folder`.

    The head is wider than the tokenizer has tokens, as most real ones are, so it can produce ids
    that have no text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": IM_START,
        "eos_token_id": IM_END,
    }
    ends = {"bos_token_id": IM_START, "eos_token_id": [IM_END, ENDOFTEXT]}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", ends)
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    tokenizer().save(str(folder / "tokenizer.json"))
    weights = _weights(config, seed)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def tiny_embedder(folder: Path, *, pooling: str = "lasttoken", **files: Any) -> Path:
    """The same as a checkpoint of sentence-transformers. files: further files by their stem."""
    tiny_llama(folder)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"idx": i, "type": f"sentence_transformers.models.{k}"} for i, k in enumerate(kinds)]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    written: dict[str, Any] = {
        "modules": modules,
        "1_Pooling/config": {f"pooling_mode_{pooling}": True, "include_prompt": True},
        "config_sentence_transformers": {"prompts": {"query": "Query: ", "document": ""}},
        **files,
    }
    for name, content in written.items():
        write_json(folder / f"{name}.json", content)
    return folder


def tiny_reranker(folder: Path, *, layers: int = 2, hidden: int = 64) -> Path:
    """The same as a reranker that says `n` or `y`: its tokenizer has no longer tokens."""
    tiny_llama(folder, layers=layers, hidden=hidden)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    write_json(folder / "config.json", {**config, "classifier_from_token": ["n", "y"]})
    return folder


def shallow_copy(checkpoint: Path, folder: Path, *, layers: int = 2) -> Path:
    """Its first layers, under its tokenizer and template: all is as in the whole, but cheap, and
    what it says is nonsense."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    dropped = [f"model.layers.{n}." for n in range(layers, config["num_hidden_layers"])]
    weights: dict[str, mx.array] = mx.load(str(checkpoint / "model.safetensors"))  # type: ignore[assignment]
    kept = {name: w for name, w in weights.items() if not name.startswith(tuple(dropped))}
    mx.save_safetensors(str(folder / "model.safetensors"), kept, {"format": "mlx"})
    write_json(folder / "config.json", {**config, "num_hidden_layers": layers})
    return folder


def _weights(config: dict[str, Any], seed: int) -> dict[str, mx.array]:
    parameters = tree_flatten(Model(ModelArgs.from_dict(config)).parameters())
    return random_weights({name: array.shape for name, array in sorted(parameters)}, seed)


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, mx.array]:
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    return {
        name: _random(name, shape, key)
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }


def _random(name: str, shape: tuple[int, ...], key: mx.array) -> mx.array:
    if len(shape) == 1:  # a norm's scale
        return mx.ones(shape)
    # Large enough that the context matters and the likeliest token is rarely a close call.
    size = 1.0 if "embed" in name else 2.0 * shape[-1] ** -0.5
    return mx.random.normal(shape, key=key) * size


def tokenizer(further: tuple[str, ...] = ()) -> Tokenizer:
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in (*SPECIAL, *further)]
    )
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2), "utf-8")
