"""What a first request to gpt-oss waits for is in the log."""

import hashlib
import lzma
import os
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from mlx_server.errors import ModelUnusable
from mlx_server.families.harmony import GPT_OSS
from mlx_server.models.checkpoint import Checkpoint, read_checkpoint
from mlx_server.prompts.harmony import vocabulary as harmony_vocabulary
from mlx_server.prompts.harmony.vocabulary import (
    ENTRIES_SHA256,
    FOLDER_VARIABLE,
    SHA256,
    SPECIAL,
    TOKENS,
    check,
    encoding,
    entries,
    replay_tokenizer,
    shipped,
)
from tests.families import SAMPLES, byte_level, write_checkpoint
from tests.prompts.harmony.gpt_oss import said
from tests.tables import cases


@pytest.mark.slow
def test_the_shipped_vocabulary_is_openais(gpt_oss: Checkpoint) -> None:
    assert hashlib.sha256(shipped()).hexdigest() == SHA256


@pytest.mark.slow
def test_a_checkpoints_tokenizer_has_the_same_tokens(gpt_oss: Checkpoint) -> None:
    tokens = [b64decode(line.split()[0]) for line in shipped().splitlines()]
    assert [gpt_oss.tokenizer.byte_level(id) for id in range(TOKENS)] == tokens
    assert hashlib.sha256(entries(gpt_oss.tokenizer)).hexdigest() == ENTRIES_SHA256


@pytest.mark.slow
def test_a_replay_models_tokenizer_passes_for_it_and_spells_any_text(
    gpt_oss: Checkpoint, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, replay_tokenizer(), config={"model_type": "gpt_oss"})
    quick = read_checkpoint(tmp_path).tokenizer
    check(quick)
    for text in SAMPLES:
        assert quick.decode(quick.encode(text)) == text
    words = "The weather in Paris is sunny, isn't it?"
    assert quick.encode(words) == gpt_oss.tokenizer.encode(words)


def test_the_tokenizer_and_harmony_agree(gpt_oss: Checkpoint) -> None:
    for text in (*SAMPLES, "".join(SAMPLES), "a  b\r\n\n c'll I'VE 12345 ././\n"):
        assert gpt_oss.tokenizer.encode(text) == encoding().encode(text)
        assert gpt_oss.tokenizer.decode(gpt_oss.tokenizer.encode(text)) == text
    for id, token in enumerate(SPECIAL, TOKENS):
        assert gpt_oss.tokenizer.encode(token) == [id]
        spelled = token if token != "<|endofprompt|>" else "<|reserved_200018|>"
        assert encoding().encode(spelled, allowed_special="all") == [id]


@cases
def test_another_vocabulary_is_the_models_fault(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path, byte_level(), config=config)
    with pytest.raises(ModelUnusable, match=r"tokenizer\.json"):
        GPT_OSS.render(read_checkpoint(folder), said())


@pytest.mark.parametrize(
    "content", [None, b"", b"\xfd7zXZ\x00", lzma.compress(b"IQ== 0\n"), b"text"]
)
def test_a_damaged_vocabulary_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    path = tmp_path / "o200k_base.tiktoken.xz"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(harmony_vocabulary, "SHIPPED", path)
    with pytest.raises(ModelUnusable, match="install mlx-server again"):
        shipped()


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, "/nowhere"])
def test_the_vocabulary_is_never_looked_for_elsewhere(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.setattr(harmony_vocabulary, "_encoding", None)
    if before is None:
        monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(FOLDER_VARIABLE, before)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # a download would fail
    monkeypatch.setenv("TIKTOKEN_RS_CACHE_DIR", "/nowhere")
    assert encoding().encode("Hello") == [13225]
    assert os.environ.get(FOLDER_VARIABLE) == before


def test_a_full_disk_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harmony_vocabulary, "_encoding", None)
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(ModelUnusable, match="TMPDIR"):
        encoding()
