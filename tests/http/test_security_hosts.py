"""Which hosts may use the server."""

import pytest

from mlx_server.errors import SettingsError
from tests.http.gate import Inner, a_gate, call


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LocalHost:1",
        "127.0.0.1",
        "127.0.0.1:8000",
        "127.8.9.10:80",
        "[::1]",
        "[::1]:8000",
        "[0:0:0:0:0:0:0:1]:8000",
        "mybox.lan",
        "MyBox.LAN:9999",
        "proxied",
        "10.1.2.3:8000",
        "[fe80::1]",
    ],
)
def test_hosts_that_may_use_the_server(host: str) -> None:
    inner = Inner()
    hosts = ["MYBOX.lan", "proxied:8443", "10.1.2.3", "fe80::1"]
    assert call(a_gate(inner, hosts=hosts), ("host", host)).status == 200
    assert len(inner.scopes) == 1


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        [""],
        ["localhost", "localhost"],
        ["localhost", "evil.com"],
        ["evil.com"],
        ["evil.com:8000"],
        ["localhost.evil.com"],
        ["127.0.0.1.evil.com"],
        ["evil.com.mybox.lan"],
        ["mybox.lan.evil.com"],
        ["localhost."],
        ["localhost.:8000"],
        ["127.0.0.1."],
        ["localhost:"],
        ["localhost:80:80"],
        ["localhost:http"],
        ["localhost:-1"],
        ["user@localhost"],
        ["evil.com@localhost"],
        ["localhost@evil.com"],
        ["localhost evil.com"],
        [" localhost"],
        ["localhost "],
        ["localhost\t"],
        ["localhost,evil.com"],
        ["localhost/"],
        ["localhost#"],
        ["localhost\\evil.com"],
        ["http://localhost"],
        ["löcalhost"],
        ["localhost\u00a0"],
        ["0x7f.0.0.1"],
        ["0x7f000001"],
        ["2130706433"],
        ["0177.0.0.1"],
        ["127.000.000.001"],
        ["127.1"],
        ["127.0.0.1.1"],
        ["128.0.0.1"],
        ["0.0.0.0"],
        ["192.168.1.5"],
        ["[::1"],
        ["::1"],
        ["::1]"],
        ["[::1]]"],
        ["[::1]x"],
        ["[::1%lo]"],
        ["[127.0.0.1]"],
        ["[::2]"],
        ["[::ffff:10.0.0.1]"],
        ["*"],
        ["."],
        ["a..b"],
    ],
)
def test_hosts_that_may_not(hosts: list[str]) -> None:
    inner = Inner()
    app = a_gate(inner, hosts=["mybox.lan"])
    answer = call(app, *(("host", host) for host in hosts), chunks=())
    assert answer.status == 403
    expected = "server.allowed_hosts" if len(hosts) == 1 else "exactly one Host"
    assert expected in answer.error["message"]
    assert answer.error["code"] == "forbidden"
    assert answer.headers["x-request-id"].startswith("req_")
    assert inner.scopes == []


@pytest.mark.parametrize(
    ("bound", "host", "status"),
    [
        ("192.168.1.5", "192.168.1.5:8000", 200),
        ("192.168.1.5", "192.168.1.6", 200),
        ("0.0.0.0", "10.0.0.7:8000", 200),
        ("0.0.0.0", "[fe80::1]:8000", 200),
        ("0.0.0.0", "0.0.0.0:8000", 200),
        ("0.0.0.0", "localhost", 200),
        ("0.0.0.0", "evil.com", 403),
        ("0.0.0.0", "10.1", 403),
        ("::", "10.0.0.7", 200),
        ("::", "evil.com", 403),
        ("", "10.0.0.7", 200),
        ("mybox.lan", "mybox.lan:8000", 200),
        ("mybox.lan", "other.lan", 403),
        ("::1", "10.0.0.7", 403),
        ("127.0.0.2", "10.0.0.7", 403),
        ("localhost", "10.0.0.7", 403),
    ],
)
def test_the_bound_address_widens_what_a_host_may_be(bound: str, host: str, status: int) -> None:
    assert call(a_gate(Inner(), bound=bound), ("host", host)).status == status


def test_a_long_host_is_not_repeated_whole() -> None:
    answer = call(a_gate(Inner()), ("host", "e" * 5000))
    assert answer.status == 403
    assert len(answer.error["message"]) < 200


@pytest.mark.parametrize("host", ["*", "http://mybox", "my box", ""])
def test_a_host_that_is_none_is_a_wrong_setting(host: str) -> None:
    with pytest.raises(SettingsError, match="allowed_hosts"):
        a_gate(Inner(), hosts=[host])
