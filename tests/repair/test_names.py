import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.repair.calls import match_tool_name

TOOLS = ("get_weather", "search", "functions.odd", "add", "Add", "fetch-url", "docs__find", "___")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("get_weather", "get_weather"),
        (" get_weather\n", "get_weather"),
        ('"get_weather"', "get_weather"),
        ("`search`", "search"),
        ("functions.get_weather", "get_weather"),
        ("functions:get_weather", "get_weather"),
        ("tools.search", "search"),
        ("default_api.search", "search"),
        ("functions.odd", "functions.odd"),
        ("get_weather<|channel|>commentary", "get_weather"),
        ("get_weather<|constrain|>json", "get_weather"),
        ("get_weather<｜tool▁sep｜>x", "get_weather"),
        ("get_weather[ARGS]", "get_weather"),
        ("get_weather.json", "get_weather"),
        ("functions.get_weather json", "get_weather"),
        ("search()", "search"),
        ("search:0", "search"),
        ("search.search", "search"),
        ("functions.odd.functions.odd", "functions.odd"),
        ("functions.get_weather<|channel|>analysis", "get_weather"),
        ("GetWeather", "get_weather"),
        ("get-weather", "get_weather"),
        ("functions.Get_Weather", "get_weather"),
        ("fetch_url", "fetch-url"),
        ("functions.web.search", "search"),
        ("functions.docs.find", "docs__find"),
        ("docs.find", "docs__find"),
        ("find", "docs__find"),
        ("add", "add"),
        ("Add", "Add"),
        ("___", "___"),
    ],
)
def test_the_tool_that_was_meant(written: str, meant: str) -> None:
    assert match_tool_name(written, TOOLS) == meant


@pytest.mark.parametrize(
    "written",
    [
        "",
        " ",
        "ADD",  # two tools are as near
        "weather",
        "get_weathers",
        "get_weather2",
        "functions.",
        "<|channel|>get_weather",
        "--",
        "...",
        "functions.functions.search",
        "web.search",
        "functions.web.read",
        "searchfunctions.",
    ],
)
def test_no_tool_is_guessed(written: str) -> None:
    assert match_tool_name(written, TOOLS) is None


@given(st.text(), st.lists(st.text(), max_size=4))
def test_it_is_one_of_them_or_none(written: str, names: list[str]) -> None:
    found = match_tool_name(written, names)
    assert found is None or found in names
    assert (found == written) == (written in names)


def test_a_name_without_end_takes_no_time() -> None:
    assert match_tool_name("<|" * 200_000, TOOLS) is None
    assert match_tool_name("x" * 400_000, TOOLS) is None
    assert match_tool_name("x" + " " * 400_000 + "y", TOOLS) is None
