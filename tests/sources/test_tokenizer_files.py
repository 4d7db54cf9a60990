"""A tokenizer.json that is made of another format is made once, and whole or not at all."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from mlx_server import limits
from mlx_server.errors import ModelUnusable
from mlx_server.models.files import OWN, TOKENIZERS
from mlx_server.sources import tokenizer_files
from mlx_server.sources.tokenizer_files import tokenizer_json
from tests.models.test_tokenizer import KIMI, kimi


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_SERVER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_made_is_kept_and_made_anew_for_other_files(tmp_path: Path) -> None:
    folder = kimi(tmp_path / "kimi")
    first = tokenizer_json(folder)
    written = first.stat().st_mtime_ns
    assert tokenizer_json(folder) == first
    assert first.stat().st_mtime_ns == written
    assert tokenizer_json(kimi(folder, tokens=3000)) != first


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_another_config_or_another_content_makes_another_file(tmp_path: Path) -> None:
    folder = kimi(tmp_path / "kimi", tokens=300)
    found = {tokenizer_json(folder)}
    (folder / "tokenizer_config.json").write_text(json.dumps({**KIMI, "more": 1}))
    found.add(tokenizer_json(folder))
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelUnusable):
        tokenizer_json(folder)
    assert len(found) == 2


def test_its_own_file_goes_before_all_others_and_is_not_copied(tmp_path: Path, cache: Path) -> None:
    folder = kimi(tmp_path / "kimi", tokens=300)
    (folder / OWN).write_text("{}")
    assert tokenizer_json(folder) == folder / OWN
    (folder / OWN).unlink()
    (folder / "tokenizer.model").write_bytes(b"never read")
    assert tokenizer_json(folder).is_relative_to(cache)
    for name in TOKENIZERS:
        (folder / name).unlink(missing_ok=True)
    assert tokenizer_json(folder) == folder / OWN, "which is the one that is missing"


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_disk_that_is_full_leaves_nothing_and_is_told_of(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    folder = kimi(tmp_path / "kimi", tokens=300)

    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path if fails == "replace" else os, fails, full)
        with pytest.raises(ModelUnusable, match=r"No space left on device.*MLX_SERVER_CACHE"):
            tokenizer_json(folder)
    assert files(cache) == []
    assert tokenizer_json(folder).is_file(), "it is made once there is space"


def test_a_cache_that_is_a_file_is_told_of(tmp_path: Path, cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(ModelUnusable, match="MLX_SERVER_CACHE"):
        tokenizer_json(kimi(tmp_path / "kimi", tokens=300))


def no_library(*args: object, **options: object) -> None:
    raise AssertionError("this process converts a tokenizer")


def test_another_process_converts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library does it in a few calls, which let no other thread run."""
    folder = kimi(tmp_path / "kimi", tokens=300)
    monkeypatch.setattr(tokenizers.models, "BPE", no_library)
    assert b"<|reserved_token_300|>" in tokenizer_json(folder).read_bytes()


def test_another_process_completes_a_large_file(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    content = tokenizer_json(kimi(tmp_path / "kimi", tokens=300)).read_bytes()
    (folder / OWN).write_bytes(content)
    lacks = {"added_tokens_decoder": {"999": {"content": "<new>", "special": True}}}
    found = []
    for most in (len(content), len(content) - 1):
        monkeypatch.setattr(tokenizer_files, "SEARCHED_BYTES", most)
        (folder / "tokenizer_config.json").unlink(missing_ok=True)
        assert tokenizer_json(folder) == folder / OWN, "it lacks nothing"
        (folder / "tokenizer_config.json").write_text(json.dumps(lacks))
        made = tokenizer_json(folder)
        found.append(made.read_bytes())
        made.unlink()
        monkeypatch.setattr(tokenizer_files, "completed", no_library)
    assert found[0] == found[1]
    assert b"<new>" in found[0]


def test_why_there_is_none_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = kimi(tmp_path / "kimi", tokens=300)
    program = tmp_path / "program.py"
    program.write_text("import socket; socket.socket(fileno=0).send(bytes(4))")
    with monkeypatch.context() as patched:
        ends = replace(tokenizer_files.PROGRAM, file=str(program))
        patched.setattr(tokenizer_files, "PROGRAM", ends)
        with pytest.raises(ModelUnusable, match=r"tiktoken\.model can't be converted.*ended"):
            tokenizer_json(folder)
    (folder / "tiktoken.model").write_bytes(b"YQ== 0\nYg== 2\n")
    with pytest.raises(ModelUnusable, match="leave gaps"):
        tokenizer_json(folder)
    os.truncate(folder / "tiktoken.model", limits.TOKENIZER_BYTES + 1)
    with pytest.raises(
        ModelUnusable, match=r"tiktoken\.model can't be read.*larger than 67,108,864"
    ):
        tokenizer_json(folder)
