"""The checkpoint of a replay model: made once, whole, and fit for any text."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mlx_server.errors import ModelUnusable
from mlx_server.families import FAMILIES, family_named
from mlx_server.families.base import ModelFamily
from mlx_server.families.json_families import PLAIN, SMOLLM2
from mlx_server.messages import Conversation, Message
from mlx_server.models.checkpoint import Checkpoint, read_checkpoint
from mlx_server.sources import replay_checkpoint as module
from mlx_server.sources.replay_checkpoint import replay_checkpoint

SOME_FAMILIES = pytest.mark.parametrize(
    "family", [*FAMILIES[::6], family_named("gpt_oss")], ids=lambda family: family.name
)
"""The one that brings a tokenizer of its own, and some that get one of bytes."""


ROOT = Path(__file__).parents[2]


def made(folder: Path, family: ModelFamily) -> Checkpoint:
    return read_checkpoint(replay_checkpoint(folder, family))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelFamily], Checkpoint]:
    folder = tmp_path_factory.mktemp("replay")
    return cache(lambda family: made(folder, family))


@pytest.mark.slow
@SOME_FAMILIES
def test_special_tokens_of_the_family_are_single_ids(
    checkpoint_of: Callable[[ModelFamily], Checkpoint], family: ModelFamily
) -> None:
    checkpoint = checkpoint_of(family)
    tokenizer = checkpoint.tokenizer
    if not family.special_tokens:  # then those of its stop tokens that are missing are ignored
        assert family.stops(checkpoint) == {tokenizer.id_of(module.END)}
        return
    for token in (*family.special_tokens, *family.stop_tokens):
        assert tokenizer.encode(token) == [tokenizer.id_of(token)]
        assert tokenizer.encode(f"a{token}b") == [
            *tokenizer.encode("a"),
            tokenizer.id_of(token),
            *tokenizer.encode("b"),
        ]


@SOME_FAMILIES
def test_an_answer_can_end(
    checkpoint_of: Callable[[ModelFamily], Checkpoint], family: ModelFamily
) -> None:
    checkpoint = checkpoint_of(family)
    stops = family.stops(checkpoint)
    assert stops
    assert all(checkpoint.tokenizer.is_silent(token) for token in stops)
    assert max(stops) < checkpoint.config["vocab_size"] == checkpoint.tokenizer.vocabulary


@pytest.mark.slow
@SOME_FAMILIES
@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_comes_back_a_byte_a_token(
    checkpoint_of: Callable[[ModelFamily], Checkpoint], family: ModelFamily, text: str
) -> None:
    assume(not any(token in text for token in family.special_tokens))
    tokenizer = checkpoint_of(family).tokenizer
    ids = tokenizer.encode(text)
    assert family.replay_tokenizer() or len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer()
    assert "".join([detokenizer.feed(id) for id in ids]) == text


@pytest.mark.slow
@SOME_FAMILIES
def test_a_conversation_is_rendered(
    checkpoint_of: Callable[[ModelFamily], Checkpoint], family: ModelFamily
) -> None:
    checkpoint = checkpoint_of(family)
    conversation = Conversation((Message("system", "Be brief."), Message("user", "Hi 🙂")))
    rendered = family.render(checkpoint, conversation)
    text = checkpoint.tokenizer.decode(rendered.tokens)
    if family.name == "gpt_oss":
        assert "Be brief." in text
        assert "Hi 🙂" in text
    else:
        assert text == "system: Be brief.\nuser: Hi 🙂\nassistant: "


def test_it_is_made_once(tmp_path: Path) -> None:
    first = replay_checkpoint(tmp_path, SMOLLM2)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert replay_checkpoint(tmp_path, SMOLLM2) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    assert replay_checkpoint(tmp_path, PLAIN) != first
    assert len(list(tmp_path.iterdir())) == 2, "nothing else is left there"


def test_it_is_another_one_when_the_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = replay_checkpoint(tmp_path, SMOLLM2)
    monkeypatch.setattr(module, "TEMPLATE", "{{ messages[0].content }}")
    second = replay_checkpoint(tmp_path, SMOLLM2)
    assert second != first
    assert b"messages[0]" in contents(second)["tokenizer_config.json"]


@pytest.mark.slow
def test_processes_that_make_it_at_once_agree(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from mlx_server.families.json_families import SMOLLM2
from mlx_server.sources.replay_checkpoint import replay_checkpoint
print("ready", flush=True)
sys.stdin.readline()
print(replay_checkpoint(Path(sys.argv[1]), SMOLLM2))
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "cache")],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    found = {process.communicate(timeout=30)[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 3
    (path,) = found
    assert list((tmp_path / "cache").iterdir()) == [Path(path.strip())]


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text = Path.write_text

    def full(path: Path, text: str, encoding: str | None = None) -> int:
        if path.name == "config.json":
            raise OSError(28, "No space left on device")
        return write_text(path, text, encoding)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ModelUnusable, match=r"No space left.*MLX_SERVER_CACHE"):
        replay_checkpoint(tmp_path, SMOLLM2)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    made(tmp_path, SMOLLM2)


def test_a_cache_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelUnusable, match="MLX_SERVER_CACHE"):
        replay_checkpoint(tmp_path / "file" / "replay", SMOLLM2)
