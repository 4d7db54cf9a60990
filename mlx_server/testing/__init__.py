"""A kit for testing apps offline: a pytest plugin whose server answers what the test says.

See README.md next to this file. Importing it costs nearly nothing: what runs is imported by the
first test that uses it.
"""

from mlx_server.testing.kit import AskedRequest, MlxReplay
from mlx_server.testing.scripted import ScriptedAnswer, call, raw, say, think, tokens

__all__ = [
    "AskedRequest",
    "MlxReplay",
    "ScriptedAnswer",
    "call",
    "raw",
    "say",
    "think",
    "tokens",
]
