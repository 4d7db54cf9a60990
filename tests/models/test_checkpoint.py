"""What a checkpoint's folder says, and what it says wrongly."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from mlx_server.errors import ModelUnusable
from mlx_server.models.checkpoint import (
    ADDED,
    FILES,
    MAP,
    Checkpoint,
    flags_of,
    read_chat_templates,
    read_checkpoint,
    read_special_tokens,
)
from tests.families import byte_level, write_checkpoint
from tests.tables import cases


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), byte_level())


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    for file in made.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def read(folder: Path, **files: Any) -> Checkpoint:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_checkpoint(folder)


def test_the_demo_model(demo_path: Path) -> None:
    checkpoint = read_checkpoint(demo_path)
    assert (checkpoint.model_type, checkpoint.context_length) == ("llama", 8192)
    assert checkpoint.end_tokens == {2}
    assert checkpoint.tokens["eos_token"] == "<|im_end|>"
    assert checkpoint.template
    assert checkpoint.template.reads == {"messages", "add_generation_prompt"}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelUnusable, match=f"{name} is missing"):
        read_checkpoint(folder)


DAMAGED = (b"", b"{", b"[1, 2]", b"null", b'"text"', b"\xff\xfe\x00", b"[" * 100_000)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ModelUnusable, match=name):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_that_may_be_missing_is_passed_over(
    folder: Path, name: str, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / name).write_bytes(content)
    checkpoint = read_checkpoint(folder)
    assert (checkpoint.sampling, checkpoint.tokens) == ({}, {})
    assert name in caplog.text


@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_end_tokens_are_an_id_or_several(folder: Path, file: str) -> None:
    assert read(folder, **{file: {"eos_token_id": 7}}).end_tokens == {7}
    assert read(folder, **{file: {"eos_token_id": [7, 9]}}).end_tokens == {7, 9}
    assert read(folder, **{file: {"eos_token_id": None}}).end_tokens == frozenset()


@pytest.mark.parametrize(
    "wrong", ["7", ["7"], [None], True, [True], 7.5, {"a": 1}, -1, [-1], [[7]], 10**30]
)
def test_end_tokens_that_are_no_ids_are_passed_over(folder: Path, wrong: object) -> None:
    found = read(folder, config={"eos_token_id": wrong}, generation_config={"eos_token_id": [3]})
    assert found.end_tokens == {3}


def test_end_tokens_come_from_everywhere(folder: Path) -> None:
    checkpoint = read(
        folder,
        config={"eos_token_id": 300},
        generation_config={"eos_token_id": [301, 302]},
        tokenizer_config={"eos_token": "<|im_end|>"},
    )
    assert checkpoint.end_tokens == {300, 301, 302, checkpoint.tokenizer.id_of("<|im_end|>")}


RECOMMENDED = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
}


def test_the_publishers_sampling(folder: Path) -> None:
    generation = {**RECOMMENDED, "do_sample": True, "max_length": 20, "num_beams": 4}
    assert read(folder, generation_config=generation).sampling == RECOMMENDED


def test_a_publisher_who_does_not_sample_wants_the_likeliest(folder: Path) -> None:
    generation = {"do_sample": False, "temperature": 0.7, "top_p": 0.9}
    assert read(folder, generation_config=generation).sampling == {"temperature": 0, "top_p": 0.9}


@cases
def test_sampling_that_makes_no_sense_is_left_out_and_told(
    folder: Path, caplog: pytest.LogCaptureFixture, name: str, value: object
) -> None:
    with caplog.at_level(logging.WARNING):
        found = read(folder, generation_config={**RECOMMENDED, name: value}).sampling
    assert found == {k: v for k, v in RECOMMENDED.items() if k != name}
    assert name in caplog.text


ODD_TEXTS = st.sampled_from(["<a>", "<b>", "", "\ud800", "9" * 5000, "7", "²", "content"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ODD_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_TEXTS, inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    [
        *("eos_token", "image_token", "extra_special_tokens", "additional_special_tokens"),
        *("added_tokens_decoder", "<a>", "\ud800"),
    ]
)
SMALL_FILES = st.dictionaries(KEYS, VALUES, max_size=4)


@pytest.mark.slow
@given(config=SMALL_FILES, older=SMALL_FILES, added=SMALL_FILES)
def test_any_values_give_tokens_or_none(
    tmp_path_factory: pytest.TempPathFactory, config: Any, older: Any, added: Any
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / MAP).write_text(json.dumps(older))
    (folder / ADDED).write_text(json.dumps(added))
    found = read_special_tokens(folder, config)
    missing = found.missing_from({})
    assert all(token.content for token in missing)
    assert found.missing_from(dict(enumerate(missing))) == []
    assert set(found.texts.values()) <= {token.content for token in missing}


def test_flags_are_those_of_the_small_files(tmp_path: Path) -> None:
    listed = {"7": {"content": "<a>", "lstrip": True, "special": False}}
    config = {"added_tokens_decoder": listed, "eos_token": "<b>", "pad_token": "<a>"}
    own = {7: AddedToken("<a>", rstrip=True), 8: AddedToken("<b>", special=True)}
    (token,) = read_special_tokens(tmp_path, config).missing_from(own)
    flags = flags_of(token)
    assert token.content == "<a>"
    assert flags | {"normalized": True} == {
        **dict.fromkeys(("single_word", "rstrip"), False),
        **dict.fromkeys(("lstrip", "normalized", "special"), True),
    }


TEXTS = st.sampled_from(["", "x", "default", "tool_use", "name", "template"])
TEMPLATES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(TEMPLATES)
def test_any_value_gives_texts(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    found = read_chat_templates(tmp_path_factory.getbasetemp(), {"chat_template": value})
    assert found.keys() <= FILES.keys()
    assert all(isinstance(text, str) and text for text in found.values())


def test_line_ends_are_those_of_unix(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes("\ufeffa\r\nb\rc\né".encode())
    assert read_chat_templates(tmp_path, {}) == {"default": "a\nb\nc\né"}
