"""Reads one tokenizer.json and makes the calls to it: the program of a TokenizerProcess, run as
`tokenizer_child.py MEMORY_BYTES FILE SOCKET...` with a descriptor for each socket.

The first socket gets the facts before any call. The process ends when the server closes them all.
"""

import ctypes
import gc
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from mlx_server.errors import ModelUnusable
from mlx_server.models.tokenizer_file import TokenizerFile, content_of
from mlx_server.models.tokenizer_process import TokenizerRefusal
from mlx_server.system.sandbox.child import LENGTH_BYTES, enter_sandbox


def main(memory: str, file: str, *descriptors: str) -> None:
    sockets = [socket.socket(fileno=int(each)) for each in descriptors]
    try:
        content = content_of(Path(file))
        enter_sandbox(int(memory))
        tokenizer = TokenizerFile(content)
        facts: Any = tokenizer.facts()
    except ModelUnusable as error:
        facts = TokenizerRefusal(error.message)
    except MemoryError:
        facts = TokenizerRefusal(
            f"tokenizer.json of this model needs more than {int(memory) >> 20} MiB to be read. "
            "Download the model again."
        )
    _send(sockets[0], facts)
    if isinstance(facts, TokenizerRefusal):
        return
    del content, facts
    _free_memory()
    for each in sockets:
        threading.Thread(target=_serve, args=(each, tokenizer)).start()


def _free_memory() -> None:
    """Returns what reading took to the system: three times what the tokenizer needs."""
    gc.collect()
    gc.freeze()
    with suppress(AttributeError):  # on macOS
        ctypes.CDLL(None).malloc_trim(0)


def _serve(channel: socket.socket, tokenizer: TokenizerFile) -> None:
    reader = channel.makefile("rb")
    while head := reader.read(LENGTH_BYTES):
        name, *arguments = msgspec.msgpack.decode(reader.read(int.from_bytes(head)))
        try:
            reply = getattr(tokenizer, name)(*arguments)
        except ModelUnusable as error:
            reply = TokenizerRefusal(error.message)
        _send(channel, reply)


def _send(channel: socket.socket, reply: Any) -> None:
    packed = msgspec.msgpack.encode(reply)
    channel.sendall(len(packed).to_bytes(LENGTH_BYTES) + packed)


if __name__ == "__main__":
    main(*sys.argv[1:])
