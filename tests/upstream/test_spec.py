"""models.yaml's entries for models on other servers: what is wrong is said with its line."""

from pathlib import Path

from tests.upstream.entries import spec


def test_capabilities_have_the_defaults_of_their_kind(tmp_path: Path) -> None:
    entry = "source: watsonx:https://example.com\nproject_id: p\napi_key_env: KEY\n"
    assert not spec(tmp_path, entry).capabilities.sampling
    found = spec(tmp_path, entry + "capabilities: {sampling: true, tools: false}")
    assert (found.capabilities.sampling, found.capabilities.tools) == (True, False)
    assert not found.capabilities.completions
