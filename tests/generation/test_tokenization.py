"""Prompts are tokenised for every family as they are for an answer, without weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_server.families import FAMILIES
from mlx_server.generation.tokenization import chat_tokens, text_of, text_tokens
from mlx_server.messages import Conversation, Message
from mlx_server.pool.prepare import ModelSpec, PreparedModel, prepare
from mlx_server.requests import GenerateRequest

HI = Conversation((Message("user", "Salü <|im_end|>"),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenized")
    (folder / "said.jsonl").write_text(json.dumps({"output": "Yes."}))
    return folder


def replayed(folder: Path, family: str) -> PreparedModel:
    spec = ModelSpec("m", f"replay:{folder / 'said.jsonl'}", family=family)
    return prepare(spec, lambda *progress: None, upcast=True)


def request(conversation: Conversation = HI) -> GenerateRequest:
    return GenerateRequest("m", (conversation,))


@pytest.mark.slow
@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_a_prompt_of_each_family(folder: Path, family: str) -> None:
    prepared = replayed(folder, family)
    tokens = chat_tokens(prepared, request(), add_special_tokens=False)

    ended = chat_tokens(
        prepared, request(replace(HI, add_generation_prompt=False)), add_special_tokens=False
    )
    assert tokens[: len(ended)] == ended
    assert "Salü" in text_of(prepared, ended)


def test_template_kwargs(tiny_path: Path) -> None:
    template = "{{ color }}{% for message in messages %}{{ message.content }}{% endfor %}"
    spec = ModelSpec("m", str(tiny_path), chat_template=template)
    prepared = prepare(spec, lambda *progress: None, upcast=True)
    red = request(replace(HI, template_kwargs={"color": "red"}))
    found = chat_tokens(prepared, red, add_special_tokens=False)
    assert text_of(prepared, found) == "redSalü <|im_end|>"
    assert found[:3] == text_tokens(prepared, "red", "prompt", add_special_tokens=False)
