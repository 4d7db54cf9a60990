"""Models of no known family: their own chat template, and text for an answer."""

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.text import TextParser

PLAIN = ModelFamily(name="plain", make_parser=TextParser)
