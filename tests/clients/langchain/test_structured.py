"""A schema as LangChain asks for it, and a tool that is chosen."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel

from mlx_server.clients.langchain import ChatMLX
from tests.clients.langchain.made import PARIS, get_weather
from tests.clients.recorded import Wire, call, completion, recorded


class City(BaseModel):
    """A city."""

    city: str


METHODS: dict[Literal["json_schema", "function_calling", "json_mode"], Wire] = {
    "json_schema": completion(PARIS),
    "json_mode": completion(PARIS),
    "function_calling": completion(None, tool_calls=[call("City", PARIS)]),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_schema_is_asked_for_by_each_method(method: Any) -> None:
    with recorded(METHODS[method], METHODS[method]) as server:
        llm = ChatMLX(model="m", base_url=server.url)
        assert llm.with_structured_output(City, method=method).invoke("Where?") == City(
            city="Paris"
        )
        schema = {"title": "City", **City.model_json_schema()}
        raw = llm.with_structured_output(schema, method=method, include_raw=True).invoke("Where?")
    assert (raw["parsed"], raw["parsing_error"]) == ({"city": "Paris"}, None)
    first, second = server.requests
    wanted = {"json_schema": "json_schema", "json_mode": "json_object"}.get(method)
    for body in (first, second):
        assert body.get("response_format", {}).get("type") == wanted
        assert ("tools" in body) == (method == "function_calling")


def test_a_tool_is_chosen_by_its_name_only_if_it_is_there() -> None:
    llm = ChatMLX(model="m")
    with pytest.raises(ValueError, match="the tools are get_weather"):
        llm.bind_tools([get_weather], tool_choice="get_time")
    bound: Any = llm.bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
    assert bound.kwargs["tool_choice"]["function"] == {"name": "get_weather"}
    assert bound.kwargs["parallel_tool_calls"] is False
