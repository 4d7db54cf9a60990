"""A tokenizer.json that another process reads: it makes the same ids, and no thread here waits."""

import gc
import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import tokenizers

from mlx_server import limits
from mlx_server.errors import ModelReplaced, ModelUnusable, TokenizerUnavailable
from mlx_server.models import tokenizer_process
from mlx_server.models.tokenizer import Tokenizer, read_tokenizer
from mlx_server.models.tokenizer_file import Spans, TokenizerFile, content_of
from mlx_server.models.tokenizer_process import CONNECTIONS, TokenizerProcess
from tests.families import SAMPLES, byte_fallback, byte_level, write_checkpoint
from tests.live.server import eventually

TEXTS = (*SAMPLES, "", "<s>", "< s >", "<|im_start|>a<|im_end|>", " ".join(SAMPLES) * 30)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, byte_level("<s>", "</s>")) / "tokenizer.json"


def pids() -> set[int]:
    """The processes that read tokenizers."""
    program = str(tokenizer_process.PROGRAM)
    return {each.pid for each in psutil.Process().children() if program in each.cmdline()}


def in_a_process(file: Path) -> Tokenizer:
    return Tokenizer(file, TokenizerProcess(file))


@pytest.mark.parametrize("made", [byte_level, byte_fallback])
def test_it_is_the_same_tokenizer(
    made: Callable[..., tokenizers.Tokenizer], tmp_path: Path
) -> None:
    whole = made("<s>", "<|im_start|>", tokenizers.AddedToken("ß", normalized=True))
    whole.normalizer = tokenizers.normalizers.Lowercase()
    file = write_checkpoint(tmp_path, whole) / "tokenizer.json"
    here, there = Tokenizer(file), in_a_process(file)
    for text in TEXTS:
        ids = here.encode(text)
        assert there.encode(text) == ids
        assert there.encode_as_spelled(text) == here.encode_as_spelled(text)
        assert there.encode_prompt(text, 1 << 20) == here.encode_prompt(text, 1 << 20)
        assert there.raw(ids) == here.raw(ids) == whole.decode(ids, skip_special_tokens=False)
        assert there.decode(ids) == here.decode(ids) == whole.decode(ids)
    assert there.pair([1], [2]) == here.pair([1], [2])
    assert there.as_text("<") == here.as_text("<")
    assert there.control_tokens == here.control_tokens
    for id in range(whole.get_vocab_size() + 2):
        assert there.entry(id) == here.entry(id) == whole.id_to_token(id)
        assert there.spelling(id) == here.spelling(id)
        assert (entry := here.entry(id)) is None or here.id_of(entry) == id
    assert here.id_of("no such token") is here.id_of("") is None
    assert here.id_of("\udfff") is None


def test_ids_take_no_more_exchanges_than_calls_of_the_library(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs a switch to the other process and back: what a template writes into each prompt
    costs one, once."""
    calls: list[str] = []

    class Counted(TokenizerFile):
        def encode(self, text: str, special: bool) -> list[int]:
            calls.append(text)
            return super().encode(text, special)

        def encode_marking(self, text: str) -> tuple[list[int], Spans]:
            calls.append(text)
            return super().encode_marking(text)

    here, there = Tokenizer(file, Counted(content_of(file))), in_a_process(file)
    exchange, exchanges = tokenizer_process._Child.exchange, list[bytes]()

    def counted(child: tokenizer_process._Child, packed: bytes) -> bytes:
        exchanges.append(packed)
        return exchange(child, packed)

    monkeypatch.setattr(tokenizer_process._Child, "exchange", counted)
    for text in (*TEXTS, "a b " * 100_000):
        for turn in range(3):
            exchanges.clear()
            calls.clear()
            assert there.encode_prompt(text, 1 << 20) == here.encode_prompt(text, 1 << 20)
            assert there.encode_as_spelled(text) == here.encode_as_spelled(text)
            assert len(exchanges) <= len(calls)
            if turn and len(text) <= tokenizer_process.SHORT:
                assert len(exchanges) <= 1
            assert sum(map(len, exchanges)) <= sum(len(call.encode()) + 64 for call in calls)


def test_a_large_file_is_not_read_in_this_process(
    demo_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library reads it in one call, which lets no other thread run."""
    whole = Tokenizer(demo_path / "tokenizer.json")
    read: list[int] = []

    class Library(SimpleNamespace):
        @staticmethod
        def from_str(json: str) -> tokenizers.Tokenizer:
            read.append(len(json))
            return library.from_str(json)

    library = tokenizers.Tokenizer
    monkeypatch.setattr(tokenizers, "Tokenizer", Library)
    assert read_tokenizer(demo_path / "tokenizer.json").encode("hello") == whole.encode("hello")
    assert sum(read) < limits.DECODER_CHARACTERS


def test_a_killed_one_is_replaced_and_ends_with_its_tokenizer(file: Path) -> None:
    before = pids()
    own = in_a_process(file)
    ids = own.encode("a")
    (pid,) = pids() - before
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "it is dead")
    assert own.encode("a") == ids
    assert len(pids() - before) == 1
    del own
    gc.collect()
    assert pids() <= before  # others may have ended meanwhile


def test_one_that_is_killed_again_is_an_error_of_this_request(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, exchange = in_a_process(file), tokenizer_process._Child.exchange

    def killing(child: tokenizer_process._Child, packed: bytes) -> bytes:
        child._process.kill()
        child._process.wait()
        return exchange(child, packed)

    with monkeypatch.context() as patched:
        patched.setattr(tokenizer_process._Child, "exchange", killing)
        with pytest.raises(TokenizerUnavailable):
            own.encode("a")
    assert own.encode("a")


def test_a_file_that_was_replaced_is_not_taken_for_the_first(file: Path) -> None:
    own = TokenizerProcess(file)
    file.write_text(byte_level("<s>", "<other>").to_str())
    own._child._process.kill()
    with pytest.raises(ModelReplaced):
        own.encode("a", False)


@pytest.mark.slow
def test_one_that_does_not_reply_is_given_up(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TOKENIZER_SECONDS", 1)
    own = TokenizerProcess(file)
    os.kill(own._child._process.pid, signal.SIGSTOP)
    assert own.encode("a", False)


@pytest.mark.slow
def test_more_threads_than_connections_wait(file: Path) -> None:
    own = in_a_process(file)
    text = " ".join(SAMPLES) * 20
    with ThreadPoolExecutor(3 * CONNECTIONS) as threads:
        asked = [threads.submit(own.encode, text[at:]) for at in range(60)]
        assert [each.result() for each in asked] == [own.encode(text[at:]) for at in range(60)]


def written(**parts: Any) -> str:
    return json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}, **parts})


GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1001}
ENDLESS = {"type": "Sequence", "decoders": [{"type": "Fuse"}] * (1 << 14)}
FAR = {"type": "BPE", "vocab": {"a": 1 << 30}, "merges": []}

DAMAGED: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "can't be read or used"),
    "nothing of it": ("[]", "can't be read or used"),
    "a normalizer that grows": (written(normalizer=GROWS), "many times longer"),
    "a decoder without end": (written(decoder=ENDLESS), "its decoder takes more"),
    "a far id": (written(model=FAR), "token id 1073741824"),
}


@pytest.mark.slow
@pytest.mark.parametrize("made", [Tokenizer, in_a_process])
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_named(
    damage: str, made: Callable[[Path], Tokenizer], tmp_path: Path
) -> None:
    content, message = DAMAGED[damage]
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelUnusable, match=message) as found:
        made(tmp_path / "tokenizer.json")
    assert "tokenizer.json" in found.value.message


@pytest.mark.slow
@pytest.mark.parametrize("made", [Tokenizer, in_a_process])
def test_a_file_that_is_too_large(
    made: Callable[[Path], Tokenizer], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = limits.TOKENIZER_BYTES
    with file.open("r+b") as opened:
        opened.seek(0, 2)
        opened.write(b" " * (whole - opened.tell()))
        assert made(file).encode("a")
        opened.write(b" ")
    with pytest.raises(ModelUnusable, match=r"has more than 64 MiB.*a smaller one"):
        made(file)


def test_a_file_that_needs_too_much_memory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TOKENIZER_MEMORY", 1 << 20)
    vocabulary = {f"token{id}": id for id in range(100_000)}
    file.write_text(written(model={"type": "BPE", "vocab": vocabulary, "merges": []}))
    with pytest.raises(ModelUnusable, match="may have 1 MiB of memory"):
        TokenizerProcess(file)
