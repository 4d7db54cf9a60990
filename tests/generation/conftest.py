"""A small model of the spine's tests, whose engine is scripted."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mlx_server.models.tokenizer import Tokenizer
from mlx_server.pool import prepare as preparing
from mlx_server.pool.prepare import ModelSpec
from tests.families import byte_level, write_checkpoint
from tests.generation.scripted import CONTEXT, TEMPLATE


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(
        tmp_path_factory.mktemp("model"),
        byte_level(),
        config={"model_type": "llama", "max_position_embeddings": CONTEXT, "eos_token_id": 0},
        tokenizer_config={"chat_template": TEMPLATE, "eos_token": "<|im_end|>"},
        generation_config={"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    )
    (path / "model.safetensors").touch()
    return path


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder / "tokenizer.json")


@pytest.fixture
def spec(folder: Path, weightless: None) -> ModelSpec:
    return ModelSpec("m", str(folder))


@pytest.fixture
def weightless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of these models hold no weights to be measured."""
    monkeypatch.setattr(preparing, "weights_bytes", lambda path, upcast: 0)


@pytest.fixture
def replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelSpec]:
    """A replay model with these entries."""
    monkeypatch.setenv("MLX_SERVER_CACHE", str(tmp_path))

    def made(*entries: Mapping[str, Any], family: str = "smollm2") -> ModelSpec:
        path = tmp_path / "said.jsonl"
        path.write_text("\n".join(map(json.dumps, entries)), "utf-8")
        return ModelSpec("m", f"replay:{path}", family=family)

    return made
