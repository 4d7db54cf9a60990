"""The formats that a client may ask for, as rules of a grammar."""

from mlx_server.grammars.lark import Lark
from mlx_server.requests import Format


def rule_of(wanted: Format, lark: Lark) -> str:
    raise NotImplementedError
