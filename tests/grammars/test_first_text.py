"""The plainest text that a grammar allows."""

import pytest

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars.compiler import control_ids, first_text
from mlx_server.grammars.lark import Lark

CONTROL = ["<call>", "<end>"]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ('"ab" | "b"', "ab"),
        ('"" | "a"', ""),
        (r"/[ \n\t]*b/", "b"),
        ('%json {"enum": [{"a": [1, 2]}]}', '{"a": [1, 2]}'),
        ("/é/", "é"),
    ],
)
def test_it_ends_as_early_as_the_grammar_may(rule: str, text: str) -> None:
    assert first_text(f"start: {rule}\n", ()) == text


def test_a_control_token_comes_before_text_that_could_go_on() -> None:
    lark = Lark(control_ids(CONTROL))
    grammar = lark.source(f'/[a-z]+/ | {lark.text("<call>")} "f" {lark.text("<end>")}').source
    assert first_text(grammar, CONTROL) == "<call>f<end>"


def test_what_is_no_grammar_is_refused() -> None:
    with pytest.raises(InvalidGrammar, match="nobody"):
        first_text("start: nobody\n", ())
