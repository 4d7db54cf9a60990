"""`GET /version`, by which clients tell servers apart."""

import re

from fastapi import FastAPI
from starlette.testclient import TestClient

from mlx_server import __version__
from mlx_server.api.version import router


def test_it_is_the_packages_version_in_vllms_form() -> None:
    app = FastAPI()
    app.include_router(router)
    answer = TestClient(app).get("/version")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"version": __version__}
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", __version__)
