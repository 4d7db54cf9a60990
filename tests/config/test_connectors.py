"""Connectors in models.yaml."""

from pathlib import Path

import pytest

from tests.config.loading import load, problem, written

pytestmark = pytest.mark.usefixtures("folder")


def test_a_connector_has_one_way_to_its_server(folder: Path) -> None:
    text = """
        connectors:
          here: {command: ./tools/server, args: [-v], env: {TOKEN: hush}}
          found: {command: npx}
          there: {url: "https://example.com/mcp", headers: {X-Key: hush}}
    """
    found = load(written(text)).connectors
    assert found["here"].command == str(folder / "tools" / "server")
    assert found["found"].command == "npx"
    assert "hush" not in repr(found)
    logins = "connectors:\n  a: {url: 'https://x', login: true}\n"
    assert load(written(logins)).connectors["a"].login is True
    for wrong, message in {
        "{}": "should have either a `url` or a `command`",
        "{url: 'https://x', command: y}": "should have either a `url` or a `command`",
        "{url: 'https://x', args: [y]}": "`args` needs a `command`",
        "{url: 'file:///etc/passwd'}": "should be an http or https URL",
        "{comand: x}": "unknown key: did you mean `command`?",
        "{command: x, oauth: {issuer: 'https://i', client_id: a, client_secret: b}}": (
            "`oauth` needs a `url`"
        ),
        "{command: x, login: true}": "`login` needs a `url`",
        "{url: 'https://x', login: true, oauth: {client_id: a, client_secret: b}}": (
            "`oauth` needs an `issuer`"
        ),
        "{url: 'https://x', oauth: {client_id: a, issuer: 'https://i'}}": "or a `login`",
    }.items():
        assert message in str(problem(f"connectors:\n  a: {wrong}\n"))
