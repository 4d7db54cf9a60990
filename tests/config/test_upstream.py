"""models.yaml's entries for models on other servers: what is wrong is said with its line."""

from pathlib import Path

import pytest

from mlx_server.config.models_yaml import check_file
from mlx_server.upstream.spec import UpstreamCapabilities
from tests.upstream.entries import spec, written

SECRET = "hunter2"


def test_an_entry_with_nothing_but_its_source(tmp_path: Path) -> None:
    found = spec(tmp_path, "source: openai+https://example.com/v1/")
    assert (found.kind, found.url) == ("openai", "https://example.com/v1")
    assert (found.model, found.host) == ("up", "example.com")
    assert found.capabilities == UpstreamCapabilities()


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        (f"source: openai+https://me:{SECRET}@example.com/v1", "no user, password or query"),
        (f"source: openai+https://example.com/v1?key={SECRET}", "no user, password or query"),
        ("source: openai+example.com", "followed by an http or https URL"),
        ("source: openai+file:///etc/passwd", "followed by an http or https URL"),
        ("source: watsonx:https://example.com\napi_key_env: K", "either a `project_id` or a"),
        (
            "source: watsonx:https://example.com\napi_key_env: K\nproject_id: p\nspace_id: s",
            "either a `project_id` or a",
        ),
        ("source: watsonx:https://example.com\nproject_id: p", "have an `api_key_env`"),
        ("source: demo:smollm2\napi_key_env: KEY", "`api_key_env` needs a `source`"),
        ("source: openai+http://h\napi_key_env: sk-abc", "should match"),
        ("source: openai+http://h\nfallback: [nowhere]", "the name of another model"),
        ("source: openai+http://h\nfallback: [up]", "the name of another model"),
        ("source: openai+http://h\ncapabilities: {tool: true}", "did you mean `tools`?"),
        ("source: openai+http://h\nupstream: {retry: 1}", "did you mean `retries`?"),
        ("source: openai+http://h\nupstream: {retries: 11}", "at most 10"),
    ],
)
def test_a_mistake(entry: str, wrong: str, tmp_path: Path) -> None:
    (problem,) = check_file(written(tmp_path, entry))
    assert wrong in str(problem)
    assert SECRET not in str(problem)
