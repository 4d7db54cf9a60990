"""Events and bodies that have no value, several values, or one within another."""

import pytest

from mlx_server.upstream.responses import END, values_of

VALUE: dict[str, object] = {"choices": []}


@pytest.mark.parametrize("text", ["ping", " Heartbeat\n", "null", '""', "[]", "[null]"])
def test_what_says_nothing_has_no_value(text: str) -> None:
    assert not list(values_of(text))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('[{"choices": []}, {"id": 1}]', [VALUE, {"id": 1}]),
        ('{"choices": []}{"id": 1}', [VALUE, {"id": 1}]),
        ('{"choices": []},\n data: {"id": 1}', [VALUE, {"id": 1}]),
        ('{"choices": []}\n[DONE]', [VALUE, END]),
    ],
)
def test_several_values_are_read_one_by_one(text: str, values: list[object]) -> None:
    assert list(values_of(text)) == values


@pytest.mark.parametrize("name", ["data", "response", "result"])
def test_an_answer_within_another_value_is_taken_out(name: str) -> None:
    (found,) = values_of(f'{{"{name}": {{"choices": []}}, "usage": {{"prompt_tokens": 7}}}}')
    assert found == VALUE | {"usage": {"prompt_tokens": 7}}
    assert list(values_of(f'{{"{name}": {{"id": 1}}}}')) == [{name: {"id": 1}}]


def test_what_is_no_json_is_an_error() -> None:
    for text in ("<html>", '{"choices": []} <html>'):
        with pytest.raises(ValueError, match=r".+"):
            list(values_of(text))
