"""Call formats that models of other families write, whose training data had them."""

from dataclasses import replace

from mlx_server.tool_parsers.call_format import CallFormat
from mlx_server.tool_parsers.formats import FUNCTOOLS, HERMES, MISTRAL
from mlx_server.tool_parsers.tag_formats import QWEN3_CODER_WITHOUT_BLOCK

FOREIGN_FORMATS: tuple[CallFormat, ...] = tuple(
    # no repair: it would hold a text that mentions a delimiter back to its end
    replace(each, repair=None, repairs=("format",), blocks=())
    for each in (HERMES, QWEN3_CODER_WITHOUT_BLOCK, MISTRAL, FUNCTOOLS)
)
"""Formats whose opening delimiter is certain to mean a call if a known tool's name follows it."""
