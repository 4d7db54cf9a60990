"""DeepSeek's calls in sections, with the spellings of their delimiters that models write."""

import re
from dataclasses import replace

from mlx_server.tool_parsers.named_calls import NamedCallFormat
from mlx_server.tool_parsers.respelled import respelled

_DEEPSEEK = NamedCallFormat(
    opens="<｜tool▁calls▁begin｜>",
    before_name="<｜tool▁call▁begin｜>",
    name=re.compile(r"[^<>\n{]+"),
    after_name="<｜tool▁sep｜>",
    closes_call="<｜tool▁call▁end｜>",
    between="",
    closes="<｜tool▁calls▁end｜>",
    inner=("<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    fenced=True,
    repair_unit="block",
    ends_answer=True,
    space="",
)
_WITHOUT_SECTION = replace(_DEEPSEEK, opens=_DEEPSEEK.before_name, repairs=("unmarked",))

DEEPSEEK = _DEEPSEEK.call_format()
DEEPSEEK_WITHOUT_SECTION = _WITHOUT_SECTION.call_format()
DEEPSEEK_RESPELLED = tuple(
    replace(form, repairs=("format", *form.repairs)).call_format()
    for known in (_DEEPSEEK, _WITHOUT_SECTION)
    for form in respelled(known)
)
