"""A login's file that is not private, or none of ours, is not used."""

from pathlib import Path

import pytest

from mlx_server.mcp import StoredLogin
from tests.mcp.logins import logged_in, running, said

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o604])
async def test_a_file_that_others_can_use_is_not_used(kept: StoredLogin, mode: int) -> None:
    async with running() as server:
        await logged_in(server, kept)
        kept.file.chmod(mode)
        assert "not private" in await said(server, kept)
        await logged_in(server, kept)
        assert await said(server, kept) == "seen"


async def test_a_file_that_is_none_of_ours(kept: StoredLogin, tmp_path: Path) -> None:
    async with running() as server:
        await logged_in(server, kept)
        elsewhere = tmp_path / "elsewhere"
        kept.file.rename(elsewhere)
        kept.file.symlink_to(elsewhere)
        assert "can't be read" in await said(server, kept)
        kept.file.unlink()
        kept.file.mkdir(0o700)
        assert "damaged" in await said(server, kept)
        kept.file.rmdir()
        for text in ("{", "[]", '{"url": 1}', "x" * (1 << 20) + "x"):
            kept.file.touch(0o600)
            kept.file.write_text(text)
            assert "damaged" in await said(server, kept)
