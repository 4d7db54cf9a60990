"""The listening sockets, which are bound before anything else is started."""

import errno
import ipaddress
import os
import re
import socket
from collections import deque
from threading import Thread
from typing import IO

from mlx_server.errors import SettingsError

DEFAULT_URL = "http://127.0.0.1:8000"
"""The server's address if nothing else is set; `mlx-server chat` looks for a server there."""


def is_loopback(host: str) -> bool:
    """Whether the host is this machine, by its name or address alone: it is not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """Opens one socket for each address of `host`. Raises SettingsError if one can't be bound."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise SettingsError(
            f"The host {host!r} can't be resolved ({error.strerror}). Set `host` under `server` in "
            "models.yaml, or --host, to an address of this machine."
        ) from error
    sockets: list[socket.socket] = []
    try:
        for family, *_, address in dict.fromkeys(addresses):
            sockets.append(_bound(family, address))
    except OSError as error:
        for each in sockets:
            each.close()
        raise SettingsError(_why_not(host, port, error)) from error
    return sockets


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # as asyncio does: the port can be bound again right after a server has ended
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address)
    except OSError:
        listening.close()
        raise
    return listening


def _why_not(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"Port {port} is in use: another program, or another mlx-server, listens on {host}."
                f" Choose another port with `--port {port + 1}` (0 picks a free one), or find the "
                f"program with `lsof -nP -i :{port}` and end it."
            )
        case errno.EACCES | errno.EPERM:
            return (
                f"Port {port} needs an administrator's rights. Choose one above 1023 with --port."
            )
        case errno.EADDRNOTAVAIL:
            return (
                f"This machine does not have the address {host}. Set `host` under `server` in "
                "models.yaml, or --host, to one that it has."
            )
        case _:
            why = os.strerror(error.errno) if error.errno else "an unknown error"
            return f"Can't listen on {host}, port {port}: {why}."


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return url_at(host, port)


def url_at(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def announced_url(output: IO[str]) -> str | None:
    """The URL at which the server with this output listens; None if it did not start. What it
    prints afterwards is discarded, so that it never waits for a reader."""
    for line in output:
        if announced := re.match(r"Listening on (http://\S+)", line):
            Thread(target=_discard, args=(output,), daemon=True).start()
            return announced[1]
    output.close()
    return None


def _discard(output: IO[str]) -> None:
    with output:
        deque(output, maxlen=0)
