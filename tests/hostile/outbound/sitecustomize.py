"""Lets no connection leave this machine, and writes down who tried.

Python imports it when it starts, since its folder is on the PYTHONPATH of the whole suite: so it is
in servers, engines and whatever else the tests start. Needs the standard library alone.
"""

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "TESTS_OUTBOUND"
"""Names the file of attempts; unset, connections may leave."""

CONNECTS = {"socket.connect", "socket.sendto", "socket.sendmsg"}
LOOKUPS = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}


class Outbound(OSError):
    """As a machine without a network would say it."""


def watch() -> None:
    sys.addaudithook(_audit)
    if "mlx_server" in sys.orig_argv and "serve" in sys.orig_argv:
        watch_uvloop()


def attempts() -> list[str]:
    """Since the last time somebody asked."""
    file = Path(os.environ.get(VARIABLE, os.devnull))
    found = file.read_text("utf-8").splitlines()
    if found:
        file.write_text("", "utf-8")
    return found


@contextmanager
def allowed() -> Iterator[None]:
    """Also for processes that are started meanwhile."""
    file = os.environ.pop(VARIABLE)
    try:
        yield
    finally:
        os.environ[VARIABLE] = file


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not CONNECTS:  # the interpreter ends, and has emptied this module
        return
    if event in CONNECTS:
        address = args[1]
        if isinstance(address, tuple) and address and isinstance(address[0], str):
            _check(event, address[0])
    elif event in LOOKUPS and not _is_numeric(args[0]):  # without a request
        _check(event, args[0])


def _check(what: str, host: str | bytes | None) -> None:
    name = host.decode("ascii", "replace") if isinstance(host, bytes) else host
    file = os.environ.get(VARIABLE)
    if not file or not name or name.lower() == "localhost" or _is_here(name):
        return
    with open(file, "a", encoding="utf-8") as log:
        log.write(f"{what} {name[:200]!r} by {' '.join(sys.orig_argv)[:100]!r}\n")
    raise Outbound(f"no connection leaves the tests: {name[:200]!r}")


def _is_here(name: str) -> bool:
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name == socket.gethostname()
    return address.is_loopback or address.is_unspecified


def _is_numeric(host: Any) -> bool:
    text = host.decode("ascii", "replace") if isinstance(host, bytes) else host
    if text is None or ":" in text:
        return True
    try:
        socket.inet_aton(text)
    except (OSError, UnicodeError):
        return False
    return True


def watch_uvloop() -> None:
    """It connects by a library of its own, which raises no audit events."""
    try:
        from uvloop import Loop
    except ImportError:
        return
    connect, look_up = Loop.create_connection, Loop.getaddrinfo

    async def connecting(
        self: Loop, factory: Any, host: Any = None, port: Any = None, **more: Any
    ) -> Any:
        _check("uvloop connects", host)
        return await connect(self, factory, host, port, **more)

    async def looking_up(self: Loop, host: Any, port: Any, **more: Any) -> Any:
        if not _is_numeric(host):
            _check("uvloop looks up", host)
        return await look_up(self, host, port, **more)

    for name, checked in {"create_connection": connecting, "getaddrinfo": looking_up}.items():
        setattr(Loop, name, checked)


if os.environ.get(VARIABLE):
    watch()
