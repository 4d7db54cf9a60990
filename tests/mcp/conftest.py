from pathlib import Path

import pytest

from mlx_server.mcp import StoredLogin
from mlx_server.mcp.login_file import path_in


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def kept(tmp_path: Path) -> StoredLogin:
    return StoredLogin("wiki", path_in(tmp_path, "wiki/1"))
