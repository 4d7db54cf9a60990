from pathlib import Path

import pytest

from mlx_server.clients.connect.clients import CLIENTS
from mlx_server.clients.connect.showing import listing, markdown, shown
from mlx_server.clients.connect.template import Connection

README = Path(__file__).parents[3] / "mlx_server" / "clients" / "README.md"
SAMPLE = Connection("http://127.0.0.1:8000", "none", "qwen3-4b", 40_960)


@pytest.mark.parametrize("name", CLIENTS)
def test_what_is_shown_is_all_that_a_client_needs(name: str) -> None:
    text = shown(CLIENTS[name], SAMPLE)
    for value in (SAMPLE.url, SAMPLE.model, CLIENTS[name].command[0]):
        assert value in text
    assert str(SAMPLE.context) in text or "no setting for the length" in text
    assert all(file.path in text for file in CLIENTS[name].files)


def test_all_clients_are_listed() -> None:
    assert [line.split()[0] for line in listing().splitlines()] == list(CLIENTS)


def test_the_document_is_made_from_the_same_records() -> None:
    assert f"-->\n{markdown()}" in README.read_text("utf-8"), (
        "made by `mlx-server connect --markdown`"
    )
