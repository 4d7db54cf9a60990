"""Where model files come from. The hub here is a server of our own on localhost, or a cache folder.

Hub cases run in a child process, since the hub client reads its environment when it is imported.
"""

import json
from pathlib import Path

import pytest
import tokenizers

from mlx_server.errors import ModelUnusable, SettingsError
from mlx_server.sources import demo
from mlx_server.sources.source import on_disk, resolve

pytestmark = pytest.mark.slow


CHECKPOINT = ["config.json", "tokenizer.json", "model.safetensors"]


BODY = b"{}" * 500


BODIES = {
    "config.json": json.dumps({"model_type": "llama"}).encode(),
    "tokenizer.json": tokenizers.Tokenizer(tokenizers.models.BPE()).to_str().encode(),
    "tokenizer_config.json": b"{}",
}
"""Of the files that are looked at before weights are fetched; others have the same one."""


def nothing(what: str, done: int, total: int) -> None: ...


def put(folder: Path, names: list[str]) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(BODIES.get(name, BODY))
    return folder


def test_a_local_checkpoint_by_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put(tmp_path / "models" / "mine", CHECKPOINT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    # models/mine has the form of a hub id too; what is here goes first
    for source in (str(folder), "models/mine", "./models/mine", "~/models/mine"):
        assert resolve(source, nothing) == folder.resolve()


@pytest.mark.parametrize("missing", CHECKPOINT)
def test_what_a_local_folder_lacks_is_named(tmp_path: Path, missing: str) -> None:
    folder = put(tmp_path / "mine", [name for name in CHECKPOINT if name != missing])
    with pytest.raises(ModelUnusable, match=r"mlx_lm\.convert") as caught:
        resolve(str(folder), nothing)
    assert missing.replace("model", "model*") in caught.value.message
    assert sum(name in caught.value.message for name in CHECKPOINT) <= 1


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-q4.gguf"])
def test_weights_that_no_converter_reads_are_not_to_be_converted(tmp_path: Path, name: str) -> None:
    folder = put(tmp_path / "mine", ["config.json", "tokenizer.json", name])
    for source, says in ((folder, f"{name} is not read: use a"), (folder / name, "is a file")):
        with pytest.raises(ModelUnusable, match=says) as caught:
            resolve(str(source), nothing)
        assert "safetensors" in caught.value.message
        assert "mlx_lm.convert" not in caught.value.message


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="put its folder in adapters/, and serve its base"):
        resolve(str(put(tmp_path / "mine", ["adapter_config.json"])), nothing)


@pytest.mark.parametrize(
    "source", ["/no/such/folder", "./missing", "~/missing", "~nobody/x", "missing", "a/b/c", "x\0"]
)
def test_a_folder_that_is_not_there(source: str) -> None:
    with pytest.raises(ModelUnusable, match=r"The folder '.*' does not exist"):
        resolve(source, nothing)


@pytest.mark.parametrize(
    "source", ["", "s3:bucket", "ollama:llama3", "demo:", "demo:gpt5", "hf:", "hf:name", "hf:a/b/c"]
)
def test_an_unknown_kind_is_a_settings_error(source: str) -> None:
    with pytest.raises(SettingsError):
        resolve(source, nothing)


def test_what_is_on_disk_is_told_without_fetching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SERVER_CACHE", str(tmp_path / "cache"))
    folder = put(tmp_path / "mine", CHECKPOINT)
    assert on_disk(str(folder)) == folder.resolve()
    for source in ("demo:smollm2", "demo:other", "org/a--b", str(tmp_path / "nowhere")):
        assert on_disk(source) is None
    made = put(tmp_path / "cache" / "demo" / f"smollm2-{demo.FORMAT}", list(demo.FILES))
    assert on_disk("demo:smollm2") == made
    assert on_disk("demo:other") is None
