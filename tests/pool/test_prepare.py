"""What is known of a model from its files and from models.yaml, before it is loaded."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.engine.worker_arguments import RankGroup, RankHost
from mlx_server.errors import ModelUnusable
from mlx_server.families import family_named
from mlx_server.families.base import ModelFamily
from mlx_server.families.json_families import PLAIN
from mlx_server.models.architectures import INSTALL
from mlx_server.models.checkpoint import read_checkpoint
from mlx_server.models.files import weights_bytes
from mlx_server.models.vision import tower_bytes
from mlx_server.pool.prepare import (
    ModelSpec,
    PreparedModel,
    capabilities_on_disk,
    prepare,
)
from mlx_server.system.sandbox.files import FileRefused, processed
from tests.pool.machine import WEIGHTS, held, running
from tests.sources.test_replay_checkpoint import SOME_FAMILIES
from tests.tables import cases
from tests.tiny import tiny_llama
from tests.tiny_encoders import BERT, ranking, tiny_encoder
from tests.tiny_vision import id_of, tiny_vision


def of(folder: Path, **spec: Any) -> PreparedModel:
    return prepare(ModelSpec("m", str(folder), **spec), lambda *_: None, upcast=True)


pytestmark = pytest.mark.anyio


async def test_a_model_is_what_its_files_and_its_owner_say(a: ModelSpec) -> None:
    owned = replace(
        a, id="o", aliases=(), family="smollm2", chat_template="mine", context_length=50
    )
    async with running(a, owned) as (pool, machine):
        plain, mine = await held(pool, "a"), await held(pool, "o")
        assert (plain.vocabulary, plain.nbytes) == (500, WEIGHTS)
        assert (plain.prepared.id, plain.prepared.spec) == ("a", a)
        assert (plain.prepared.family, plain.prepared.context_length) == (PLAIN, 100)
        assert plain.prepared.checkpoint.template is None
        assert (mine.prepared.family.name, mine.prepared.context_length) == ("smollm2", 50)
        assert mine.prepared.checkpoint.template
        assert mine.prepared.checkpoint.template.source == "mine"
        assert machine.log == ["load a", "load o"]


@pytest.mark.parametrize(
    ("config", "task", "right"),
    [(BERT, "generate", "embed"), (BERT, "rerank", "embed"), (ranking(BERT), "embed", "rerank")],
)
def test_a_task_that_it_was_not_trained_for(
    tmp_path: Path, config: dict[str, Any], task: Any, right: str
) -> None:
    tiny_encoder(tmp_path, config)
    with pytest.raises(ModelUnusable, match=f"Set `task: {right}`"):
        of(tmp_path, task=task)
    assert of(tmp_path).task == right


LAYERS: dict[str, tuple[dict[str, Any], bool]] = {
    "as many": ({"num_hidden_layers": 2}, True),
    "a tower that was left out": ({"vision_config": {"num_hidden_layers": 64}}, True),
    "many": ({"num_hidden_layers": 999}, False),
    "many in a nested config": ({"text_config": {"n_layer": 999}}, False),
    "many encoder layers": ({"audio_config": {"encoder_layers": 999}}, False),
    "many blocks": ({"num_blocks": 999}, False),
    "more than any model has": ({"num_hidden_layers": 9_999}, False),
    "many experts, whose weights may be one tensor": ({"num_experts": 999}, True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_the_weights_do_not_have(tmp_path: Path, name: str) -> None:
    changed, is_usable = LAYERS[name]
    tiny_llama(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    if is_usable:
        assert of(tmp_path).id == "m"
        return
    with pytest.raises(ModelUnusable, match=r"config.json: \w+ is 9,?999?.*Download"):
        of(tmp_path)


@cases
def test_layers_that_predict_further_tokens_are_counted(
    tmp_path: Path, changed: dict[str, Any], unused: int
) -> None:
    file = tiny_llama(tmp_path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    assert read_checkpoint(tmp_path).unused_heads == unused


def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch, **spec: object) -> PreparedModel:
    monkeypatch.setenv("MLX_SERVER_CACHE", str(folder / "cache"))
    (folder / "said.jsonl").write_text('{"output": "Hello."}')
    found = ModelSpec("r", f"replay:{folder / 'said.jsonl'}", **spec)  # type: ignore[arg-type]
    return prepare(found, lambda what, done, total: None, upcast=True)


@pytest.mark.slow
@SOME_FAMILIES
def test_a_replay_model_weighs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: ModelFamily
) -> None:
    found = prepared(tmp_path, monkeypatch, family=family.name)
    assert found.family is family_named(family.name)
    assert (found.weights, found.kv.for_tokens(10_000)) == (0, 0)
    assert found.path.parent == tmp_path / "cache" / "replay"
    assert found.transcript
    assert found.transcript.pick("x").entry.output == "Hello."


def test_memory_for_towers_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL", reason="the extra `vision` is not installed")
    folder = tiny_vision(tmp_path)
    spec = ModelSpec("a", str(folder))
    sees = prepare(spec, lambda *_: None, upcast=True)
    assert sees.vision
    assert sees.vision.shown("high").resizes(900, 900) == [[(256, 256)]]
    assert sees.weights == weights_bytes(folder, True) + limits.PICTURE_FEATURE_BYTES
    monkeypatch.setattr("mlx_server.pool.prepare.WORKING_BYTES", 0)
    more = prepare(spec, lambda *_: None, upcast=True)
    assert more.weights - sees.weights == tower_bytes(sees.vision, read(folder), upcast=True)
    assert more.tower_bytes == more.weights - sees.weights
    monkeypatch.setattr(limits, "TOWER_BYTES", 10 << 20)
    monkeypatch.setattr(limits, "LOW_DETAIL_TOKENS", 16)
    less = prepare(spec, lambda *_: None, upcast=True)
    assert less.vision
    ((size,),) = less.vision.shown("high").resizes(900, 900)
    assert 32 * 32 * 16 <= size[0] * size[1] < 256 * 256
    assert 0 < less.weights - sees.weights <= limits.TOWER_BYTES


@cases
def test_a_model_that_mlx_lm_lacks_is_refused_if_it_takes_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, changed: Any, why: str
) -> None:
    pytest.importorskip("PIL", reason="the extra `vision` is not installed")
    folder = tiny_vision(tmp_path, "molmo2")
    (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **changed}))
    (folder / "lost.json").symlink_to("nowhere")
    spec = ModelSpec("seer", str(folder))
    if why:
        monkeypatch.setattr(limits, "PROCESSOR_SECONDS", 1 if "1 s" in why else 30)
        with pytest.raises(ModelUnusable) as refused:
            prepare(spec, lambda *_: None, upcast=True)
        assert re.match(f"seer: it can't be used: mlx-lm.*{why}", refused.value.message)
        assert capabilities_on_disk(spec) is None
        return
    found = prepare(spec, lambda *_: None, upcast=True)
    assert found.vision
    assert found.vision.text == "<im_patch>"
    assert found.capabilities.sees
    assert found.weights == weights_bytes(folder, True) + limits.PICTURE_FEATURE_BYTES
    changed = json.loads((folder / "config.json").read_text()) | {"image_end_token_id": 5}
    (folder / "config.json").write_text(json.dumps(changed))
    os.utime(folder / "config.json", (1, 1))
    with pytest.raises(FileRefused, match=r"the model's files have been replaced .* Unload it"):
        processed(folder, b"of others", (90, 60), bytes(3 * 90 * 60))
    with pytest.raises(ModelUnusable):  # the processor is made again
        prepare(spec, lambda *_: None, upcast=True)
    monkeypatch.setattr("mlx_server.pool.prepare.can_see", lambda: False)
    with pytest.raises(ModelUnusable, match=f"this be installed: {re.escape(INSTALL)}"):
        prepare(spec, lambda *_: None, upcast=True)


@pytest.mark.parametrize(
    ("family", "name"),
    [("glm_ocr", "image_token_id"), ("kimi_k25", "media_placeholder_token_id")],
)
def test_no_model_is_said_to_see_whose_pictures_have_no_image_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, name: str
) -> None:
    pytest.importorskip("PIL", reason="the extra `vision` is not installed")
    folder, why = tiny_vision(tmp_path, family), "gets no image token from mlx-vlm's processor"
    changed = read(folder) | {name: id_of("<image>")}
    (folder / "config.json").write_text(json.dumps(changed))
    spec = ModelSpec("seer", str(folder))
    if family == "kimi_k25":  # mlx-lm has its text model
        assert prepare(spec, lambda *_: None, upcast=True).vision is None
        assert f"seer is shown no pictures: each {why}" in caplog.text
        return
    with pytest.raises(ModelUnusable, match=why):
        prepare(spec, lambda *_: None, upcast=True)


def test_a_model_over_several_machines_reads_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("PIL", reason="the extra `vision` is not installed")
    hosts = (RankHost("here", ("127.0.0.1",)), RankHost("there", ("127.0.0.2",)))
    spec = ModelSpec("a", str(tiny_vision(tmp_path)), group=RankGroup("pipeline", hosts))
    assert prepare(spec, lambda *_: None, upcast=True).vision is None
    assert "a is shown no pictures: it runs on several machines" in caplog.text


def read(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text("utf-8"))


def test_the_owners_template_goes_over_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = prepared(tmp_path, monkeypatch, family="plain", chat_template="mine")
    assert found.checkpoint.template
    assert found.checkpoint.template.source == "mine"
