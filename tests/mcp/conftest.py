from pathlib import Path

import pytest

from mlx_server.mcp import StoredLogin


@pytest.fixture
def kept(tmp_path: Path) -> StoredLogin:
    return StoredLogin.in_folder(tmp_path, "wiki/1")
