"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, Granite and others.

A block may hold several objects, an array of them, or a code fence around them.
"""

from functools import partial

from mlx_server.tool_parsers.call_format import parse_calls
from mlx_server.tool_parsers.marked_json import marked_json

HERMES = marked_json("<tool_call>", "</tool_call>")

parse_tool_call = partial(parse_calls, HERMES)
