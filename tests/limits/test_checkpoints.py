"""Checkpoints, adapters and logs: what is at a limit is taken, one more is not."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, normalizers

from mlx_server import limits
from mlx_server.checkpoints.safetensors_headers import BadHeader, read_header_of
from mlx_server.checkpoints.tokenizer_file import _check_growth
from mlx_server.lora.reader import _config_text
from mlx_server.sources.checkpoint_files import check_architecture
from mlx_server.templates import child, messages, process
from mlx_server.templates.chat_template import ChatTemplate
from mlx_server.worker import batch
from mlx_server.worker.constrained_decoding.token_trie import UnusableVocabulary, Vocabulary
from tests.limits.boundaries import Boundary, passes
from tests.lora import adapter_files as adapters


def layers(count: int) -> None:
    check_architecture({"model_type": "llama", "num_hidden_layers": count}, "m")


def normalizer(growth: int) -> None:
    found = tokenizers.Tokenizer(models.BPE())
    found.normalizer = normalizers.Replace("a", "b" * growth)
    _check_growth(found)


def template(characters: int) -> None:
    ChatTemplate("x" * characters)


@pytest.mark.parametrize(
    "case",
    [
        Boundary("CHECKPOINT_LAYERS", passes(layers)),
        Boundary("NORMALIZER_GROWTH", passes(normalizer)),
        Boundary("TEMPLATE_SOURCE", passes(template)),
    ],
    ids=str,
)
def test_one_past_it(case: Boundary, monkeypatch: pytest.MonkeyPatch) -> None:
    case.check(monkeypatch)


def test_what_a_template_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(characters: int) -> bool:
        templates = child.Templates()
        templates.reply_to(messages.CompileTemplate(b"", "{{ raise_exception(x) }}", 1))
        reply, _ = templates.reply_to(messages.RenderTemplate(b"", {"x": "x" * characters}, 1, 1))
        return reply == messages.RefusedReply("x" * characters)

    Boundary("TEMPLATE_ERROR_CHARACTERS", whole).check(monkeypatch)


def test_template_processes() -> None:
    processes = process.TemplateProcesses()
    with ExitStack() as held:
        for number in range(limits.TEMPLATE_PROCESSES.value):
            assert processes._is_free("a")  # a client may have all of them
            held.enter_context(processes._place(f"{number}"))
        assert not processes._is_free("a")
    assert processes._is_free("a")


@pytest.mark.parametrize("name", ["CHECKPOINT_HEADER_BYTES", "ADAPTER_HEADER_BYTES"])
def test_a_header(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"

    def header(size: int) -> None:
        path.write_bytes(size.to_bytes(8, "little") + b"{}".ljust(size))
        read_header_of(path, getattr(limits, name).value)

    def within(size: int) -> bool:
        try:
            header(size)
        except BadHeader:
            return False
        return True

    Boundary(name, within, lowered=100).check(monkeypatch)


def test_a_config_of_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(size: int) -> None:
        (tmp_path / "adapter_config.json").write_bytes(b"x" * size)
        _config_text(tmp_path, tmp_path / "adapter_config.json")

    Boundary("ADAPTER_CONFIG_BYTES", passes(config)).check(monkeypatch)


def test_the_rank_of_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(count: int) -> None:
        found = adapters.peft_tensors(rank=count)
        adapters.read(adapters.peft_adapter(tmp_path, found, r=count))

    Boundary("ADAPTER_RANK", passes(rank)).check(monkeypatch)


def test_a_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(count: int) -> bool:
        vocab: dict[str, Any] = {str(at): at for at in range(count)}
        (tmp_path / "tokenizer.json").write_text(
            json.dumps({"model": {"type": "BPE", "vocab": vocab}, "decoder": {"type": "ByteLevel"}})
        )
        try:
            return len(Vocabulary(tmp_path, [])) == count
        except UnusableVocabulary:
            return False

    Boundary("VOCABULARY_TOKENS", tokens, lowered=300).check(monkeypatch)


def test_sets_of_stop_tokens() -> None:
    for at in range(limits.STOP_TOKEN_SETS.value + 1):
        batch._stop_sequences((at,))
    assert batch._stop_sequences.cache_info().currsize == limits.STOP_TOKEN_SETS.value
