"""Why llguidance refuses a grammar, on one line, and the plainest text that a grammar allows."""

import pytest

from mlx_server.errors import InvalidGrammar
from mlx_server.grammars.compiler import fault, first_text, in_a_line
from tests.tables import cases


def test_a_fault_is_named() -> None:
    assert fault('start: "a"\n') == ""
    assert 'unknown name: "nobody"' in fault("start: nobody\n")
    costly = "start: A\nA: " + " & ".join(f"/(a|b|{n})*a(a|b){{{n}}}/" for n in range(20, 24))
    assert "fuel" in fault(costly)


@cases
def test_a_message_loses_its_listings_and_the_names_of_rules(message: str, line: str) -> None:
    assert in_a_line(message) == line


@cases
def test_it_ends_as_early_as_the_grammar_may(rule: str, text: str) -> None:
    assert first_text(f"start: {rule}\n", ()) == text


def test_what_is_no_grammar_is_refused() -> None:
    with pytest.raises(InvalidGrammar, match="nobody"):
        first_text("start: nobody\n", ())
