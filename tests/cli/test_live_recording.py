"""A server that records serves the one model that it was asked for."""

from pathlib import Path

import pytest
import yaml

from mlx_server.cli.live_recording import recorded_settings, secrets_of
from mlx_server.errors import SettingsError
from tests.upstream.playing import KEY, KEY_VARIABLE


def test_a_server_that_records_has_the_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    config = tmp_path / "models.yaml"
    listed = {"source": "openai+http://127.0.0.1:1/v1", "upstream_model": "theirs"}
    models = {"mine": {**listed, "aliases": ["own"], "api_key_env": KEY_VARIABLE}, "other": listed}
    config.write_text(yaml.safe_dump({"models": models, "server": {"port": 1234}}))
    settings = recorded_settings("own", config, None, None, None)
    assert (list(settings.models), settings.server.port) == (["mine"], 1234)
    assert secrets_of(settings) == [KEY]
    given = recorded_settings("a/b", config, "http://127.0.0.1:2/v1/", KEY_VARIABLE, 99)
    assert list(given.models) == ["a/b"]
    assert given.models["a/b"].source == "openai+http://127.0.0.1:2/v1"
    assert (given.models["a/b"].upstream_model, given.server.port) == ("a/b", 99)
    assert list(recorded_settings(str(tmp_path), config, None, None, None).models) == [
        tmp_path.name
    ]


@pytest.mark.parametrize(
    ("model", "url", "variable", "said"),
    [
        ("m", "", None, "--upstream: should be an http or https URL."),
        ("m", "their-server", None, "--upstream: should be an http or https URL."),
        ("m", "http://me:hunter2@host", None, "--upstream: the URL of another server should have"),
        ("m", "http://host", "not a name", "--api-key-env: "),
    ],
)
def test_what_can_not_be_recorded(
    tmp_path: Path, model: str, url: str, variable: str | None, said: str
) -> None:
    with pytest.raises(SettingsError) as wrong:
        recorded_settings(model, None, url, variable, None)
    assert wrong.value.message.startswith(said)
    assert "hunter2" not in wrong.value.message
