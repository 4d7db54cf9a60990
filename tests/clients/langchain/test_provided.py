"""LangChain's client of a provider."""

from typing import Any

import pytest

from mlx_server.clients.providers import LLMProvider, ProviderConfig
from tests.clients.langchain.made import CALLED, get_weather
from tests.clients.recorded import completion, recorded


@pytest.mark.parametrize("backend", ["mlx_server", "openai"])
def test_the_client_of_a_provider_writes_thoughts_as_configured(backend: Any) -> None:
    answer = completion("Yes.", reasoning_content="Hm.")
    config = ProviderConfig(name="p", model_name="m", provider=backend, parsing_format="think_tags")
    with recorded(answer, CALLED) as server:
        provider = LLMProvider(ProviderConfig(**{**_fields(config), "base_url": server.url}))
        found = provider.client.invoke("Is it?")
        called = provider.client.bind_tools([get_weather]).invoke("Weather?")
    assert found.content == "<think>\nHm.\n</think>\n\nYes."
    parsed = provider.parse_response(found.content)
    assert parsed == {"response": "Yes.", "thinking": "Hm."}
    assert found.additional_kwargs["thinking"] == "Hm."
    assert [each["name"] for each in called.tool_calls] == ["get_weather"]


def _fields(config: ProviderConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}
