"""models.yaml's entries for models on other servers: what is wrong is said with its line."""

from pathlib import Path

import pytest

from tests.upstream.entries import spec


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
