"""A tool of LangChain, and an answer that calls it."""

from langchain_core.tools import tool

from tests.clients.recorded import call, completion

PARIS = '{"city": "Paris"}'
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 3},
}


REPAIRS = {"repairs": [{"index": 0, "what": "name", "where": "tool_calls[0].function.name"}]}


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


CALLED = {
    **completion(None, reasoning_content="Paris?", tool_calls=[call("get_weather", PARIS)]),
    "usage": USAGE,
    "mlx_server": REPAIRS,
}
