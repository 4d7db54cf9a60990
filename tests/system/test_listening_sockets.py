"""Sockets that can't be had, and the words for it."""

import errno
import socket

import pytest

from mlx_server.errors import SettingsError
from mlx_server.system.listening_sockets import bound_sockets, url_of


def close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def test_a_name_is_bound_at_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))
        for address in ("127.0.0.1", "127.0.0.2", "127.0.0.1")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    sockets = bound_sockets("here", 0)
    assert [each.getsockname()[0] for each in sockets] == ["127.0.0.1", "127.0.0.2"]
    assert url_of(sockets[1]).startswith("http://127.0.0.2:")
    close(sockets)


def test_a_port_in_use_names_the_next_one_and_how_to_find_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"--port {port + 1}.*lsof -nP -i :{port}"):
            bound_sockets("127.0.0.1", port)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EACCES, "above 1023"),
        (errno.EADDRNOTAVAIL, "not have the address 127.0.0.1"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_other_refusals_are_said_in_words(
    code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> socket.socket:
        raise OSError(code, "as the system says it")

    monkeypatch.setattr("mlx_server.system.listening_sockets._bound", refuse)
    with pytest.raises(SettingsError, match=words):
        bound_sockets("127.0.0.1", 80)


def test_a_host_that_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(SettingsError, match=r"not known.*--host"):
        bound_sockets("studio.local", 80)
