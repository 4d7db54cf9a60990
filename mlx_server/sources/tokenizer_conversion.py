"""Makes a tokenizer.json of other files: the program of a process, `tokenizer_conversion.py
MEMORY_BYTES LIFELINE`, because the library blocks every thread meanwhile.
"""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken

from mlx_server.errors import ServerError
from mlx_server.models.byte_level import kimi_tokenizer
from mlx_server.models.files import BOM, read_optional_json
from mlx_server.models.special_tokens import SpecialTokens, flags_of, read_special_tokens
from mlx_server.sandbox.child import Served, end_with_server, serve, time_limit
from mlx_server.system.files import read_regular

OWN = "tokenizer.json"


TIKTOKEN = "tiktoken.model"

TOKENIZERS = (OWN, TIKTOKEN)
"""Names of tokenizer files; the first that exists is used."""


class ConversionRequest(msgspec.Struct):
    source: bytes
    """The path of a file that is one of TOKENIZERS, as the system has it."""
    seconds: float


class Conversion(msgspec.Struct):
    """A reply, whose payload is the tokenizer.json; it has none if the source is one already."""

    error: str = ""
    """Why there is none, for a ModelUnusable."""


class _ListedToken(msgspec.Struct):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


def completed(content: bytes, special: SpecialTokens) -> bytes | None:
    """A tokenizer.json with the special tokens that it lacks, and without a byte order mark. None
    if it can be used as it is, or can't be used at all."""
    bare = content.removeprefix(BOM)
    try:
        parts = msgspec.json.decode(bare, type=dict[str, msgspec.Raw])
        listed = msgspec.json.decode(parts.get("added_tokens", b"[]"), type=list[_ListedToken])
    except ValueError:
        return None
    flags = ({**msgspec.structs.asdict(token)} for token in listed)
    own = {flag.pop("id"): AddedToken(**flag) for flag in flags}
    if "model" not in parts or not (further := special.missing_from(own)):
        return None if bare == content else bare
    tokens = {token.content: token for token in listed}
    for token in further:  # the library gives each its next free id, whatever the file says
        id = tokens[token.content].id if token.content in tokens else len(tokens)
        tokens[token.content] = _ListedToken(id, token.content, **flags_of(token))
    parts["added_tokens"] = msgspec.Raw(msgspec.json.encode([*tokens.values()]))
    return msgspec.json.encode(parts)


def _converted(source: Path, config: Mapping[str, Any], special: SpecialTokens) -> bytes:
    made = kimi_tokenizer(source, config)
    own = made.get_added_tokens_decoder()
    present = {token.content for token in own.values()}
    further = [t for t in special.missing_from(own) if t.content not in present]
    # found in the text as it is given, as transformers does it for these files
    made.add_tokens([AddedToken(t.content, special=t.special, normalized=False) for t in further])
    text: str = made.to_str()
    return text.encode()


def _made(source: Path) -> bytes:
    config = read_optional_json(source.parent / "tokenizer_config.json")
    special = read_special_tokens(source.parent, config)
    if source.name == OWN:
        return completed(read_regular(source), special) or b""
    return _converted(source, config, special)


def _answer(frame: bytearray) -> Served:
    asked = msgspec.msgpack.decode(frame, type=ConversionRequest)
    reply, made = Conversion(), b""
    try:
        with time_limit(asked.seconds):
            made = _made(Path(os.fsdecode(asked.source)))
    except ServerError as error:
        reply = Conversion(error.message)
    return Served(msgspec.msgpack.encode(reply), made, is_last=True)


def main() -> None:
    end_with_server(int(sys.argv[2]))
    serve(socket.socket(fileno=0), _answer)


if __name__ == "__main__":
    main()
