"""Models of other servers, as the pool knows them."""

from dataclasses import replace

import pytest

from mlx_server.config.settings import ModelSettings, model_spec, validated
from mlx_server.errors import SettingsError
from mlx_server.pool.models import UpstreamModel, upstream_model
from mlx_server.pool.prepare import ModelSpec


def model(**entry: object) -> UpstreamModel:
    settings = validated(ModelSettings, {"source": "openai+http://127.0.0.1:9/v1", **entry})
    found = upstream_model(model_spec("up", settings))
    assert found
    return found


def test_a_model_of_this_server_is_none() -> None:
    assert upstream_model(ModelSpec("m", "org/name")) is None


def test_what_is_not_known_of_it_is_taken_to_be_possible() -> None:
    can = model(family="qwen3").capabilities
    assert (can.family, can.context_length, can.size_bytes) == ("qwen3", None, 0)
    assert can.reasoning
    assert can.tools
    assert can.structured_output
    assert model(context_length=50).capabilities.context_length == 50


def test_the_owners_context_goes_over_what_is_learnt() -> None:
    found = model()
    found.connection.learnt = replace(found.connection.learnt, context_length=70)
    assert found.context_length == 70
    owned = replace(found, spec=replace(found.spec, context_length=50))
    assert owned.context_length == 50


def test_a_family_is_read_as_the_owner_says() -> None:
    tags = model(reasoning_tags=("scratchpad",)).family.reasoning_tags
    assert tags != model().family.reasoning_tags
    with pytest.raises(SettingsError, match="Known families"):
        upstream_model(replace(model().spec, family="llama"))
