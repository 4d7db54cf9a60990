"""`mlx-server connectors`: a login and a logout from the command line."""

import asyncio
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from mlx_server.cli import app
from mlx_server.errors import SettingsError
from tests.mcp.authority import Authority, visit
from tests.mcp.playing import all_gone, served

pytestmark = pytest.mark.anyio


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "models.yaml"


def write(config: Path, text: str) -> None:
    config.write_text(text)


async def run(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["connectors", *arguments])


async def test_a_login_and_a_logout(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typer, "launch", visit)
    server = Authority()
    async with served(server) as server.url:
        connector = f"{{url: '{server.url}/mcp', login: true}}"
        data = f"store: {{data_dir: {tmp_path}}}\n"
        write(config, f"{data}connectors:\n  wiki: {connector}\n")
        flags = ("wiki", "--config", str(config))
        done = await run("login", *flags)
        assert (done.exit_code, server.asked[0]["code"]) == (0, "a-code")
        assert f"{server.url}/authorize?" in done.output
        assert "Logged in: wiki has 1 tools." in done.output
        server.answer = lambda asked: {"error": "access_denied"}
        refused = await run("login", *flags)
        assert (refused.exit_code, "access_denied" in refused.output) == (1, True)
    assert "Logged out of wiki." in (await run("logout", *flags)).output
    assert "There is no login of wiki." in (await run("logout", *flags)).output
    await all_gone()


async def test_a_connector_that_has_no_login(config: Path) -> None:
    write(config, "connectors:\n  a: {command: x}\n  b: {url: 'https://x', login: true}\n")
    found = await run("login", "a", "--config", str(config))
    assert isinstance(found.exception, SettingsError)
    assert "These have: b." in found.exception.message
