import pytest

from mlx_server.testing import call, raw, say, think, tokens


def test_parts_of_one_answer_are_added() -> None:
    answer = think("Hm.") + say("Let me see.") + call("f", a=1) + call("g")
    assert answer.entry()["answer"] == {
        "reasoning": "Hm.",
        "text": "Let me see.",
        "calls": [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}],
    }


def test_an_argument_may_be_called_name() -> None:
    assert call("f", name="x", self="y").calls == (("f", {"name": "x", "self": "y"}),)


def test_an_answer_has_one_text_and_one_thought() -> None:
    with pytest.raises(ValueError, match="a text twice"):
        say("a") + say("")
    with pytest.raises(ValueError, match="a reasoning twice"):
        think("a") + think("b")


def test_raw_output_and_tokens_are_whole() -> None:
    for whole in (raw("a"), tokens([1])):
        with pytest.raises(ValueError, match="is whole"):
            whole + say("b")


def test_nothing_else_can_be_added() -> None:
    with pytest.raises(TypeError):
        say("a") + "b"  # type: ignore[operator]
