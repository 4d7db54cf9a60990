"""What is read of adapters: good ones in both formats, and hostile ones of every kind."""

import json
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_server.errors import AdapterInvalid
from mlx_server.models.adapter_catalog import AdapterCatalog, BaseModelShapes
from mlx_server.models.adapter_config import (
    CONFIG,
    LARGEST,
    MLX_WEIGHTS,
    PEFT_EXTRAS,
    PEFT_WEIGHTS,
    AdapterConfig,
)
from mlx_server.models.adapter_reader import AdapterSpec, read_adapter
from tests.models.adapter_files import (
    EMBEDDING,
    EXPERTS,
    IN,
    LAYER,
    OUT,
    RANK,
    VOCABULARY,
    Break,
    config,
    mlx_adapter,
    mlx_tensors,
    numbers,
    peft_adapter,
    peft_tensors,
    read,
    refusal,
    tensors,
    with_config,
)
from tests.tables import cases

ROOT = Path(__file__).parents[2]


# Good ones


def test_mlx_lms_format(tmp_path: Path) -> None:
    folder = mlx_adapter(tmp_path / "mine")
    spec = read(folder)
    size = 2 * RANK * (IN + OUT)
    assert (spec.name, spec.path, spec.format, spec.kind) == ("mine", folder, "mlx", "lora")
    assert (spec.rank, spec.nbytes, spec.base) == (RANK, size, "org/Tiny-1B-4bit")
    assert len(spec.digest) == 64


def test_pefts_format(tmp_path: Path) -> None:
    spec = read(peft_adapter(tmp_path))
    assert (spec.format, spec.kind, spec.rank, spec.base) == ("peft", "lora", RANK, "org/Tiny-1B")
    named = {name.replace(".weight", ".mine.weight"): t for name, t in peft_tensors().items()}
    assert read(peft_adapter(tmp_path, named)).rank == RANK


def test_the_own_weight_of_a_layer_with_a_pair_is_passed_over(tmp_path: Path) -> None:
    own = {f"base_model.model.{LAYER}.base_layer.weight": numbers(OUT, IN)}
    spec = read(peft_adapter(tmp_path / "a", peft_tensors() | own))
    assert spec.nbytes == read(peft_adapter(tmp_path / "b")).nbytes
    assert "no lora_a" in refusal(peft_adapter(tmp_path / "c", own))


def test_dora_in_both_formats(tmp_path: Path) -> None:
    m = {f"{LAYER}.m": numbers(OUT)}
    assert (
        read(mlx_adapter(tmp_path / "a", mlx_tensors() | m, fine_tune_type="dora")).kind == "dora"
    )
    m = {f"base_model.model.{LAYER}.lora_magnitude_vector.weight": numbers(OUT)}
    assert read(peft_adapter(tmp_path / "b", peft_tensors() | m, use_dora=True)).kind == "dora"


def test_patterns_of_peft_give_layers_other_ranks(tmp_path: Path) -> None:
    tensors = peft_tensors() | peft_tensors("model.layers.1.self_attn.q_proj", rank=9)
    ranks = {r"layers\.(1|2)\..*q_proj": 9}
    patterns = {"rank_pattern": ranks, "alpha_pattern": {"q_proj": 3}}
    assert read(peft_adapter(tmp_path, tensors, **patterns)).rank == 9


class CountedDict(dict[str, float]):
    reads = 0

    def items(self) -> Any:
        self.reads += 1
        return super().items()


def test_the_first_alpha_that_fits_a_layer_counts_and_all_are_read_once() -> None:
    patterns = CountedDict({"q_proj$": 1, r"layers\.0\.q_proj": 2, "^k_proj": 3, "b.k_proj": 4})
    config = AdapterConfig("peft", "lora", None, 1, {"lora_alpha": 9, "alpha_pattern": patterns})
    layers = ("layers.0.q_proj", "k_proj", "b.k_proj", "a.k_proj", "aq_proj")
    assert [config.scale(layer, rank=1) for layer in layers] == [1, 3, 4, 9, 9]
    assert patterns.reads == 1


def test_embeddings_and_experts(tmp_path: Path) -> None:
    tensors = {
        f"{EMBEDDING}.lora_a": numbers(VOCABULARY, RANK),
        f"{EMBEDDING}.lora_b": numbers(RANK, IN),
        f"{EXPERTS}.lora_a": numbers(3, RANK, IN),
        f"{EXPERTS}.lora_b": numbers(3, OUT, RANK),
    }
    assert read(mlx_adapter(tmp_path, tensors)).rank == RANK
    tensors[f"{EXPERTS}.lora_a"] = numbers(2, RANK, IN)
    assert f"{EXPERTS}.lora_a" in refusal(mlx_adapter(tmp_path, tensors))


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_every_dtype_may_be_as_large_as_it_can_be(tmp_path: Path, dtype: str) -> None:
    assert read(raw_adapter(tmp_path, dtype, GREATEST[dtype])).rank == 1


def test_a_prefix_by_which_checkpoints_differ_is_no_difference(tmp_path: Path) -> None:
    names = [f"language_model.{LAYER}", LAYER.removeprefix("model.")]
    for name in names:
        assert read(mlx_adapter(tmp_path, mlx_tensors(name))).rank == RANK


def test_what_else_is_in_the_folder_does_not_count(tmp_path: Path) -> None:
    for name in ("README.md", "0000100_adapters.safetensors", "training_args.bin", "run.py"):
        (tmp_path / name).write_text("?")
    assert read(mlx_adapter(tmp_path)).rank == RANK


def test_the_samples_fit_the_demo_model_and_are_small() -> None:
    # as the demo model's files tell them, which a test can't count on being here
    sizes = {"q_proj": (576, 576), "k_proj": (192, 576), "v_proj": (192, 576), "o_proj": (576, 576)}
    shapes = {
        f"model.layers.{i}.self_attn.{name}": shape
        for i in range(30)
        for name, shape in sizes.items()
    }
    catalog = AdapterCatalog(
        BaseModelShapes(shapes, True, frozenset({"demo:smollm2"})), folder=ROOT / "adapters"
    )
    found = catalog.all()
    assert found.keys() == {"json-answer", "pirate"}
    for spec in found.values():
        assert isinstance(spec, AdapterSpec), spec
        assert (spec.rank, spec.format, spec.kind, spec.base) == (8, "mlx", "lora", "demo:smollm2")
        assert spec.nbytes < 500_000


# Hostile ones

GREATEST = {
    "F16": struct.pack("<H", 0x7BFF),
    "BF16": struct.pack("<H", 0x7F7F),
    "F32": struct.pack("<I", 0x7F7F_FFFF),
}
INFINITE = {
    "F16": struct.pack("<H", 0xFC00),
    "BF16": struct.pack("<H", 0x7F80),
    "F32": struct.pack("<I", 0xFF80_0000),
}
NAN = {
    "F16": struct.pack("<H", 0x7E01),
    "BF16": struct.pack("<H", 0x7FC0),
    "F32": struct.pack("<I", 0x7F80_0001),
}


def raw_adapter(folder: Path, dtype: str, last: bytes) -> Path:
    """Of rank 1, in any type; the last value of its B is the one given."""
    mlx_adapter(folder, lora_parameters={"rank": 1, "scale": 1.0})
    size = len(last)
    a, b = IN * size, (IN + OUT) * size
    entries = {
        f"{LAYER}.lora_a": {"dtype": dtype, "shape": [IN, 1], "data_offsets": [0, a]},
        f"{LAYER}.lora_b": {"dtype": dtype, "shape": [1, OUT], "data_offsets": [a, b]},
    }
    write_raw(folder, json.dumps(entries), bytes(b - size) + last)
    return folder


def write_raw(folder: Path, header: str, data: bytes = b"", length: int | None = None) -> None:
    text = header.encode()
    size = struct.pack("<Q", len(text) if length is None else length)
    (folder / MLX_WEIGHTS).write_bytes(size + text + data)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("values", [INFINITE, NAN])
def test_values_that_are_not_finite(tmp_path: Path, dtype: str, values: dict[str, bytes]) -> None:
    said = refusal(raw_adapter(tmp_path, dtype, values[dtype]))
    assert f"{LAYER}.lora_b" in said
    assert "not finite" in said


def test_a_value_far_into_a_large_tensor_is_looked_at(tmp_path: Path) -> None:
    a = numbers(600_000, RANK)
    a[-1, -1] = np.nan
    folder = mlx_adapter(tmp_path, {"x.lora_a": a, "x.lora_b": numbers(RANK, OUT)})
    with pytest.raises(AdapterInvalid, match=r"x\.lora_a.*not finite"):
        read_adapter(folder, base_shapes=None)


def cut(folder: Path) -> None:
    file = folder / MLX_WEIGHTS
    file.write_bytes(file.read_bytes()[:-1])


def grown(folder: Path) -> None:
    with (folder / MLX_WEIGHTS).open("ab") as file:
        file.write(b"\0")


def pickle_only(folder: Path) -> None:
    (folder / MLX_WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n")


def config_as_folder(folder: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / CONFIG).mkdir()


def pipe(folder: Path) -> None:
    (folder / MLX_WEIGHTS).unlink()
    os.mkfifo(folder / MLX_WEIGHTS)


def link_to_nowhere(folder: Path) -> None:
    (folder / MLX_WEIGHTS).unlink()
    (folder / MLX_WEIGHTS).symlink_to("nowhere")


def link_out(name: str) -> Break:
    def make(folder: Path) -> None:
        outside = folder.parent / "outside"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)

    return make


def header(text: str, data: bytes = b"", length: int | None = None) -> Break:
    return lambda folder: write_raw(folder, text, data, length)


A = f"{LAYER}.lora_a"
ENTRY = {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8]}


def entry(**changes: Any) -> Break:
    return header(json.dumps({A: {**ENTRY, **changes}}), bytes(8))


HOSTILE: Mapping[str, tuple[Break, str]] = {
    "truncated": (cut, f"{MLX_WEIGHTS} is cut short"),
    "too long": (grown, f"{MLX_WEIGHTS} is longer than its header says"),
    "nothing in it": (lambda folder: (folder / MLX_WEIGHTS).write_bytes(b""), "is empty"),
    "a pointer of Git LFS": (
        lambda f: (f / MLX_WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        f"{MLX_WEIGHTS} is a Git LFS pointer, not the file itself. Run `git lfs pull`",
    ),
    "a page for weights": (
        lambda f: (f / MLX_WEIGHTS).write_bytes(b"<!doctype html><p>Not found"),
        f"{MLX_WEIGHTS} is a web page",
    ),
    "a page for a config": (
        lambda f: (f / CONFIG).write_bytes(b"<html>Not found</html>"),
        f"{CONFIG} is a web page",
    ),
    "header of 10 GB": (header("{}", length=10 << 30), "header of 10,737,418,240 bytes"),
    "header that ends early": (header("{}", length=1000), "is cut short"),
    "header is not JSON": (header("{"), "header that is not JSON"),
    "header is a list": (header("[]"), "not a JSON object"),
    "header is deep": (header("[" * 200_000), "header that is not JSON"),
    "metadata that are no texts": (
        header(json.dumps({"__metadata__": [1], A: ENTRY}), bytes(8)),
        "metadata other than texts",
    ),
    "a tensor with a name like a book": (
        tensors({f"{'x' * 2000}.lora_a": numbers(2, 2)}),
        "is not a LoRA tensor",
    ),
    "an entry with a name like a book": (header(json.dumps({A * 40: {}})), "the tensor 'model"),
    "duplicated names": (
        header(f'{{"{A}": {json.dumps(ENTRY)}, "{A}": {json.dumps(ENTRY)}}}', bytes(8)),
        f"names '{A}' twice",
    ),
    "offsets that overlap": (
        header(json.dumps({A: ENTRY, f"{LAYER}.lora_b": ENTRY}), bytes(8)),
        f"overlap or leave a gap, at '{LAYER}.lora_b'",
    ),
    "an entry of nothing": (header(json.dumps({A: {}})), f"the tensor '{A}'"),
    "a header cut in the middle": (
        lambda folder: os.truncate(folder / MLX_WEIGHTS, 50),
        f"{MLX_WEIGHTS} is cut short",
    ),
    "no lora_parameters": (config('{"num_layers": 1}'), "no `lora_parameters`"),
    "config is a list": (config("[]"), "should be a JSON object"),
    "config is null": (config("null"), "should be a JSON object"),
    "config is not JSON": (config("rank: 8"), "not JSON"),
    "config is not UTF-8": (lambda f: (f / CONFIG).write_bytes(b'{"a": "\xff"}'), "not JSON"),
    "config is deep": (config('{"a":' * 100_000), "not JSON"),
    "config of 100 MB": (lambda f: os.truncate(f / CONFIG, 100_000_000), "larger than 1,000,000"),
    "config is a folder": (config_as_folder, f"{CONFIG} is not a file"),
    "weights are a pipe": (pipe, f"{MLX_WEIGHTS} is not a file"),
    "weights without config": (lambda f: (f / CONFIG).unlink(), f"has no {CONFIG}"),
    "config without weights": (
        lambda f: (f / MLX_WEIGHTS).unlink(),
        f"has no {MLX_WEIGHTS}. Copy it",
    ),
    "only steps of a training": (
        lambda f: [
            (f / MLX_WEIGHTS).rename(f / "0000100_adapters.safetensors"),
            (f / "0000200_adapters.safetensors").write_bytes(b""),
        ],
        f"has no {MLX_WEIGHTS}. Rename 0000200_adapters.safetensors",
    ),
    "weights of another format": (
        lambda f: (f / MLX_WEIGHTS).rename(f / PEFT_WEIGHTS),
        f"has no {MLX_WEIGHTS}. Copy the {CONFIG} that belongs to {PEFT_WEIGHTS}",
    ),
    "pickle only": (pickle_only, r"only in adapter_model\.bin, which is never opened"),
    "config links out": (link_out(CONFIG), f"{CONFIG} is a link to outside"),
    "weights link out": (link_out(MLX_WEIGHTS), f"{MLX_WEIGHTS} is a link to outside"),
    "link to nowhere": (link_to_nowhere, f"{MLX_WEIGHTS} is not a file"),
}


def assert_refused(folder: Path, spoil: Break, message: str) -> None:
    mlx_adapter(folder)
    read(folder)
    spoil(folder)
    said = refusal(folder)
    assert "'bad'" in said
    assert re.search(message, said), said
    assert len(said) < 500


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_adapters_are_refused_by_name(tmp_path: Path, name: str) -> None:
    assert_refused(tmp_path / "bad", *HOSTILE[name])


@cases
def test_hostile_entries_are_refused_by_name(tmp_path: Path, changes: Any, message: str) -> None:
    spoil = header(json.dumps({A: {**ENTRY, **changes}}), bytes(8))
    assert_refused(tmp_path / "bad", spoil, message)


@cases
def test_hostile_tensors_are_refused_by_name(
    tmp_path: Path, shapes: dict[str, list[Any]], message: str
) -> None:
    """A shape ends with the type of its numbers where that is not float16."""
    arrays = {}
    for name, shape in shapes.items():
        *sizes, dtype = shape if isinstance(shape[-1], str) else [*shape, "float16"]
        arrays[name] = numbers(*sizes, dtype=dtype)
    assert_refused(tmp_path / "bad", tensors(arrays), message)


@cases
def test_hostile_settings_are_refused_by_name(tmp_path: Path, changes: Any, message: str) -> None:
    assert_refused(tmp_path / "bad", with_config(**changes), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"peft_type": ["LORA"]}, "peft_type a list"),
        *(({name: ["lm_head"]}, f"uses `{name}`") for name in PEFT_EXTRAS),
        *(
            ({"init_lora_weights": way}, f"has the init_lora_weights {way!r}")
            for way in ("pissa", "pissa_niter_16", "OLoRA", "corda", "loftq", "lora_ga")
        ),
        ({"bias": "all"}, "trains biases"),
        ({"r": 10_000}, "a rank from 1 to 512 as `r`"),
        ({"r": 5}, "has the rank 4, but .* says 5"),
        ({"lora_alpha": None}, "a number as `lora_alpha`, but has None"),
        ({"lora_alpha": LARGEST * 1.1}, "a number as `lora_alpha`"),
        ({"target_modules": {"a": 1}}, "names as `target_modules`"),
        ({"rank_pattern": [1]}, "an object as `rank_pattern`"),
        ({"rank_pattern": {"q_proj": 0}}, "a rank from 1 to 512 as `q_proj`"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "a number as `q_proj`"),
        ({"alpha_pattern": {"(q|v)_proj": 3}}, "not the name of a layer"),
        ({"use_dora": True}, "no DoRA magnitude"),
    ],
)
def test_settings_of_peft_that_cannot_be_served(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(AdapterInvalid, match=message):
        read(peft_adapter(tmp_path, **changes))


def test_settings_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    unused = dict.fromkeys(PEFT_EXTRAS, None) | {"modules_to_save": [], "lora_bias": False}
    named: dict[str, Any] = {
        "bias": "none",
        "target_modules": "all-linear",
        "init_lora_weights": "gaussian",
    }
    assert read(peft_adapter(tmp_path, **unused, **named))


def test_a_rank_that_a_pattern_may_have_given_has_a_limit_too(tmp_path: Path) -> None:
    folder = peft_adapter(tmp_path, peft_tensors(rank=513), rank_pattern={"other": 8})
    assert "have a rank over 512" in refusal(folder)


def test_a_magnitude_of_another_length(tmp_path: Path) -> None:
    found = mlx_tensors() | {f"{LAYER}.m": numbers(OUT + 1)}
    assert "don't fit" in refusal(mlx_adapter(tmp_path, found, fine_tune_type="dora"))


def test_names_of_peft_of_which_the_model_has_none(tmp_path: Path) -> None:
    assert "another model" in refusal(peft_adapter(tmp_path, peft_tensors("encoder.attention")))
    renamed = peft_tensors("model.layers.1.mlp.experts.0.up_proj")
    assert read(peft_adapter(tmp_path, renamed)).rank == RANK, "the engine knows"


def test_one_tensor_in_two_spellings(tmp_path: Path) -> None:
    twice = {name.replace(".weight", ".default.weight"): t for name, t in peft_tensors().items()}
    assert "under two names" in refusal(peft_adapter(tmp_path, peft_tensors() | twice))


def test_a_path_to_the_weights_is_refused_with_what_to_give(tmp_path: Path) -> None:
    folder = mlx_adapter(tmp_path)
    assert "is a file. Give the folder that it is in" in refusal(folder / MLX_WEIGHTS)
    assert "has no folder: correct its path" in refusal(folder / "misspelt")


def test_weights_of_the_other_format_are_not_taken(tmp_path: Path) -> None:
    folder = peft_adapter(tmp_path)
    (folder / PEFT_WEIGHTS).rename(folder / MLX_WEIGHTS)
    assert f"has no {PEFT_WEIGHTS}" in refusal(folder)
