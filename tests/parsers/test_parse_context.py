"""A parser that prepares an answer for another one says where the answer is as that one does."""

from typing import Any

from mlx_server.parsers.parse_context import DelegatingParser, ParseContext, Parser, TextParser


class Prepared(TextParser):
    section: Any = "reasoning"
    awaits_answer: Any = True
    is_unterminated: Any = True

    def messages(self) -> Any:
        return [{"role": "assistant"}]


class Replacing(DelegatingParser):
    def replace(self, parser: Parser) -> None:
        self._parser = parser


def test_the_other_parser_says_where_the_answer_is_also_once_it_is_replaced() -> None:
    plain, prepared = TextParser(ParseContext()), Prepared(ParseContext())
    parser = Replacing(plain)
    for each in (plain, prepared):
        parser.replace(each)
        state = parser.section, parser.awaits_answer, parser.is_unterminated, parser.messages()
        assert state == (each.section, each.awaits_answer, each.is_unterminated, each.messages())
    assert state == ("reasoning", True, True, [{"role": "assistant"}])
