"""What an answer's context means for its parser, and a parser that prepares it for another one."""

from typing import Any

import pytest

from mlx_server.messages import Tool
from mlx_server.parsers.parse_context import DelegatingParser, ParseContext, TextParser
from mlx_server.repair import RepairPolicy

TOOLS = (Tool("f"),)


@pytest.mark.parametrize(
    ("context", "continues"),
    [
        (ParseContext(), False),
        (ParseContext(ends_with="<think>"), False),
        (ParseContext(continues=True), True),
        (ParseContext(continues=True, ends_with="<think>"), False),
    ],
)
def test_an_answer_continues_a_text_that_no_delimiter_opened(
    context: ParseContext, continues: bool
) -> None:
    assert context.continues_text is continues


@pytest.mark.parametrize(
    ("context", "reads"),
    [
        (ParseContext(tools=TOOLS), True),
        (ParseContext(), False),
        (ParseContext(tools=TOOLS, repair=RepairPolicy(mistakes=False)), False),
        (ParseContext(tools=TOOLS, formatted=True), False),
    ],
)
def test_calls_in_other_formats_are_read_where_there_may_be_some(
    context: ParseContext, reads: bool
) -> None:
    assert context.reads_misplaced_calls is reads


class Prepared(TextParser):
    section: Any = "reasoning"
    awaits_answer: Any = True
    is_unterminated: Any = True

    def messages(self) -> Any:
        return [{"role": "assistant"}]


def test_the_other_parser_says_where_the_answer_is_also_once_it_is_replaced() -> None:
    context = ParseContext()
    plain, prepared = TextParser(context), Prepared(context)
    parser = DelegatingParser(plain)
    for each in (plain, prepared):
        parser._parser = each
        found = parser.section, parser.awaits_answer, parser.is_unterminated, parser.messages()
        assert found == (each.section, each.awaits_answer, each.is_unterminated, each.messages())
    assert found == ("reasoning", True, True, [{"role": "assistant"}])
