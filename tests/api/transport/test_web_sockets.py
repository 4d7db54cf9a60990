"""WebSockets of one client, and of all."""

import pytest

from mlx_server.api.transport.web_sockets import OpenSockets
from mlx_server.errors import Overloaded
from tests.store.make import limit


def test_no_client_takes_all_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "SOCKETS", 5)
    limit(monkeypatch, "SOCKETS_PER_CLIENT", 3)
    sockets = OpenSockets()
    open_ = [sockets.one_more(client) for client in "aaabb"]
    for each in open_[:3]:
        each.__enter__()
    with (
        pytest.raises(Overloaded, match="You have 3 open WebSockets") as error,
        sockets.one_more("a"),
    ):
        pass
    assert error.value.code == "too_many_websockets"
    for each in open_[3:]:
        each.__enter__()
    with pytest.raises(Overloaded, match="All 5 WebSockets"), sockets.one_more("c"):
        pass
    for each in open_:
        each.__exit__(None, None, None)
    assert not sockets._of
