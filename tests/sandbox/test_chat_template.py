"""Chat templates are programs by strangers: what they may do, and how they fail."""

from datetime import datetime
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.errors import BadRequest, ModelUnusable
from mlx_server.system.sandbox.chat_template import ChatTemplate
from tests.tables import cases


def rendered(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(variables)


@cases
def test_the_sandbox_holds(source: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(BadRequest):
        rendered(source, messages=messages)
    assert messages == [{"role": "user", "content": "Hi"}]


@cases
def test_whatever_fails_inside_is_a_refusal_of_the_messages(source: str) -> None:
    with pytest.raises(BadRequest) as caught:
        rendered(source)
    assert caught.value.param == "messages"


def test_a_refusal_has_no_path_of_this_machine() -> None:
    with pytest.raises(BadRequest) as caught:
        rendered("{{ 'x'.encode('punycode') }}")  # its process can open no file
    assert "/" not in str(caught.value)


def test_its_own_refusal_reaches_the_client() -> None:
    with pytest.raises(BadRequest, match="Roles must alternate"):
        rendered("{{ raise_exception('Roles must alternate') }}")


@pytest.mark.parametrize("text", ["0123456789", "{{ '0123456789' }}"])
def test_output_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(limits, "TEMPLATE_CHARACTERS", 1000)
    assert len(rendered("{% for i in range(100) %}" + text + "{% endfor %}")) == 1000
    with pytest.raises(BadRequest, match="a prompt of more than 1000 characters"):
        rendered("{% for i in range(101) %}" + text + "{% endfor %}")


@pytest.mark.parametrize(
    "source", ["{% for x in messages %}", "{{ a b }}", "{{", "{% nonsense %}", "{{ a | nonsense }}"]
)
def test_a_template_that_does_not_compile_is_the_models_fault(source: str) -> None:
    with pytest.raises(ModelUnusable, match="chat_template"):
        ChatTemplate(source)


def test_strftime_now() -> None:
    assert rendered("{{ strftime_now('%Y-%m-%d %%') }}") == f"{datetime.now():%Y-%m-%d} %"


def test_json_is_for_models_and_not_for_html() -> None:
    value = {"ü": "<b> & 'c'", "a": [1, None, True]}
    assert rendered("{{ v | tojson }}", v=value) == '{"ü": "<b> & \'c\'", "a": [1, null, true]}'
    assert rendered("{{ v | tojson(ensure_ascii=True) }}", v="ü") == '"\\u00fc"'
    assert rendered("{{ v | tojson(indent=2) }}", v=[1]) == "[\n  1\n]"
    assert rendered("{{ '\"' + (v | tojson | safe) ~ '<' }}", v=["&"]) == '"["&"]<'
    assert rendered("{{ v | tojson(separators=(',', ':')) }}", v=[1, 2]) == "[1,2]"
    assert rendered("{{ v | tojson(sort_keys=true) }}", v={"b": 1, "a": 2}) == '{"a": 2, "b": 1}'
    assert rendered("{{ v }}", v="<b>") == "<b>"


def test_loops_can_be_left_and_continued() -> None:
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}"
    assert rendered(source + "{% break %}{% endif %}{{ i }}{% endfor %}") == "023"


def test_the_part_marked_for_training_is_text_like_any_other() -> None:
    source = "a{% generation %}{{ x }}{% if x %}c{% endif %}{% endgeneration %}d{{ y }}"
    found = ChatTemplate(source)
    assert found.render({"x": "b"}) == "abcd"
    assert found.reads == {"x", "y"}


def test_a_request_may_set_what_the_template_reads_and_nothing_else() -> None:
    source = (
        "{{ messages }}{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ enable_thinking }}"
        "{% set local = 1 %}{{ local }}{{ raise_exception }}{{ strftime_now }}{{ range }}"
        "{% if date is defined %}{{ date }}{% endif %}{% for item in messages %}{{ item }}"
        "{{ loop.index }}{% endfor %}{% macro m(parameter) %}{{ parameter }}{% endmacro %}"
        "{{ namespace(found=1).found }}"
    )
    found = ChatTemplate(source)
    names = [
        *("messages", "tools", "documents", "add_generation_prompt", "enable_thinking", "local"),
        *("raise_exception", "strftime_now", "range", "date", "item", "loop", "m", "parameter"),
        *("namespace", "found", "self", "nowhere"),
    ]
    assert [name for name in names if found.takes(name)] == ["enable_thinking", "date"]
    assert "tools" in found.reads
