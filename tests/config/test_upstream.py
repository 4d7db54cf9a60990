"""models.yaml's entries for models on other servers: what is wrong is said with its line."""

from pathlib import Path

import pytest

from mlx_server.config.models_yaml import check_file, load_settings
from mlx_server.config.settings import model_spec
from mlx_server.upstream.spec import UpstreamCapabilities, UpstreamSpec
from tests.tables import cases

SECRET = "hunter2"


def written(folder: Path, entry: str) -> Path:
    file = folder / "models.yaml"
    lines = "".join(f"    {line}\n" for line in entry.splitlines())
    file.write_text(f"models:\n  up:\n{lines}", "utf-8")
    return file


def spec(folder: Path, entry: str) -> UpstreamSpec:
    settings = load_settings(written(folder, entry), environ={})
    found = model_spec("up", settings.models["up"]).upstream
    assert found
    return found


def test_an_entry_with_nothing_but_its_source(tmp_path: Path) -> None:
    found = spec(tmp_path, "source: openai+https://example.com/v1/")
    assert (found.kind, found.url) == ("openai", "https://example.com/v1")
    assert (found.model, found.host) == ("up", "example.com")
    assert found.capabilities == UpstreamCapabilities()


@cases
def test_a_mistake(entry: str, wrong: str, tmp_path: Path) -> None:
    (problem,) = check_file(written(tmp_path, entry))
    assert wrong in str(problem)
    assert SECRET not in str(problem)


def test_capabilities_have_the_defaults_of_their_kind(tmp_path: Path) -> None:
    entry = "source: watsonx:https://example.com\nproject_id: p\napi_key_env: KEY\n"
    assert not spec(tmp_path, entry).capabilities.sampling
    found = spec(tmp_path, entry + "capabilities: {tools: false}")
    assert (found.capabilities.sampling, found.capabilities.tools) == (False, False)
    assert not found.capabilities.completions


@pytest.mark.parametrize("host", ["api.openai.com", "mine.openai.azure.com/openai"])
def test_openais_own_api_is_known_by_its_host(host: str, tmp_path: Path) -> None:
    own = spec(tmp_path, f"source: openai+https://{host}/v1").capabilities
    assert (own.max_tokens_field, own.sampling) == ("max_completion_tokens", False)
    other = spec(tmp_path, "source: openai+https://api.openai.com.example.com/v1").capabilities
    assert (other.max_tokens_field, other.sampling) == ("max_tokens", True)
