"""What is checked before a server starts: settings, transcripts and models on this machine."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from mlx_server.cli import app, startup
from mlx_server.cli.machine_checks import check_transcripts
from mlx_server.cli.startup import checked_settings, with_local_models
from mlx_server.config.settings import ModelSettings, Settings, validated
from mlx_server.errors import SettingsError
from mlx_server.system import logs
from tests.live.fork_server import ran
from tests.live.server import serving

pytestmark = pytest.mark.usefixtures("folder")


def named(*models: Path) -> list[str]:
    return [str(each) for each in models]


def test_the_demo_is_served_without_a_models_yaml_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("MLX_SERVER_API_KEY", "k")
    monkeypatch.setenv("MLX_SERVER_CACHE", "/cache")
    assert list(checked_settings(None, (), {}, None, discover=False).models) == ["smollm2-135m"]
    misspelt, demo = caplog.messages
    assert misspelt.endswith("a server does not read it: did you mean MLX_SERVER_API_KEYS?")
    assert demo.startswith("no models.yaml is here: the demo model is served")
    Path("models.yml").write_text("models: {a: {source: org/a}}")
    with pytest.raises(SettingsError, match=r"models\.yml is not read: rename it to models\.yaml"):
        checked_settings(None, (), {}, None, discover=False)


def test_models_of_the_file_are_looked_at_without_a_network(
    tiny_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tiny_path, tmp_path / "other")
    (tmp_path / "other/config.json").write_text('{"model_type": "nothing"}')
    shutil.copytree(tiny_path, tmp_path / "half")
    (tmp_path / "half/model.safetensors").unlink()
    models = {
        "absent": {"source": "./nothere"},
        "other": {"source": "./other"},
        "half": {"source": "./half"},
        "hub": {"source": "org/name"},
        "adapted": {"source": str(tiny_path), "adapters": {"mine": "./gone"}},
        "whole": {"source": str(tiny_path)},
    }
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps({"models": models}))
    settings = checked_settings(file, (), {}, None, discover=False)
    assert list(settings.models) == [*models]
    said = {message.split(" ")[0]: message for message in caplog.messages}
    assert said.keys() == {"absent", "other", "half", "adapted"}
    assert "The folder 'nothere' does not exist" in said["absent"]
    assert "model type 'nothing'" in said["other"]
    assert "lacks model*.safetensors" in said["half"]
    assert "its adapter 'mine' is not there: the folder 'gone' does not exist" in said["adapted"]


def test_what_is_listed_keeps_its_name_and_settings(studio: Path) -> None:
    mine = ModelSettings(source=str(studio / "one"), context_length=99)
    found = with_local_models(Settings(models={"mine": mine})).models
    assert {id: model.source for id, model in found.items()} == {
        "mine": str(studio / "one"),
        "org/two": str(studio / "two"),
    }
    assert found["mine"].context_length == 99


def test_names_that_are_taken_are_not_taken_again(studio: Path) -> None:
    mine = ModelSettings(source="org/other", aliases=("org/two",))
    assert list(with_local_models(Settings(models={"mine": mine})).models) == ["mine", "org/one"]


def test_what_is_damaged_or_too_large_is_not_offered(studio: Path) -> None:
    (studio / "one/tokenizer.json").unlink()
    assert list(with_local_models(Settings()).models) == ["org/two"]
    small = validated(Settings, {"server": {"memory_budget": 10}})
    assert with_local_models(small).models == {}


SAID = "- answer: {text: Yes.}\n- answer: {calls: [{name: f}]}\n"


def settings(folder: Path, family: str) -> Settings:
    (folder / "said.yaml").write_text(SAID)
    source = f"replay:{folder / 'said.yaml'}"
    return Settings(models={"fake": ModelSettings(source=source, family=family)})


def test_an_answer_that_the_family_can_not_write_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"fake: said\.yaml:2: entry 2: The family gemma3"):
        check_transcripts(settings(tmp_path, "gemma3"))


def test_answers_in_words_are_for_any_family(tmp_path: Path) -> None:
    check_transcripts(settings(tmp_path, "mistral"))


def test_serve_runs_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []
    fake = ModuleType("mlx_server.app")
    fake.run = lambda settings, log_file: served.append(settings)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlx_server.app", fake)
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # it would be so for later tests too
    monkeypatch.setattr(startup, "check_named", lambda settings, named: None)  # no hub is asked
    flags = ["--port", "0", "--host", "::1", "--api-key", "a", "--api-key", "b"]
    flags += ["--concurrency", "3", "--log-level", "debug"]
    assert CliRunner().invoke(app, ["serve", "x/y", *flags]).exit_code == 0
    (settings,) = served
    server = settings.server
    assert list(settings.models) == ["x/y"]
    assert [key.get_secret_value() for key in server.api_keys] == ["a", "b"]
    assert (server.port, server.host, server.concurrency) == (0, "::1", 3)
    assert server.log_level == "debug"


@pytest.mark.slow
def test_wrong_settings_exit_with_2() -> None:
    Path("bad.yaml").write_text("server:\n  prot: 1\n  drain_seconds: -1\n")
    result = ran("serve", "--config", "bad.yaml", "--api-key", "sk-secret x")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "bad.yaml:2: server.prot: unknown key: did you mean `port`?",
        "bad.yaml:3: server.drain_seconds: should be at least 0",
        "--api-key: a key should be one or more visible ASCII characters",
    ]
    assert result.stdout == ""
    assert ran("serve", "--host", "0.0.0.0").returncode == 2
    assert ran("serve", "--nonsense").returncode == 2


@pytest.mark.parametrize(
    ("models", "reasons"),
    [
        (["empty"], ["lacks config.json"]),
        (["org/not-there"], ["hub can't be reached"]),
        (["empty", "./gone"], ["empty", "gone: The folder 'gone' does not exist"]),
    ],
)
def test_named_models_of_which_none_can_be_served_are_the_end(
    models: list[str], reasons: list[str]
) -> None:
    Path("empty").mkdir()
    nowhere = "http://127.0.0.1:1"
    ended = ran("serve", "--port", "0", *models, HF_HOME=str(Path.cwd()), HF_ENDPOINT=nowhere)
    assert ended.returncode == 2
    for line, reason in zip(ended.stderr.splitlines(), reasons, strict=True):
        assert reason in line
    assert "Listening" not in ended.stdout


def test_with_one_that_can_be_served_the_others_are_listed(tmp_path: Path, tiny_path: Path) -> None:
    with serving(tmp_path / "run", None, str(tiny_path), str(tmp_path / "gone")) as server:
        assert "gone can't be served: The folder 'gone' does not exist" in server.log
        with server.http() as http:
            asked = {"model": tiny_path.name, "prompt": "a", "max_tokens": 2}
            assert http.post("/v1/completions", json=asked).status_code == 200
