"""Bad bodies without end: the short form of scripts/fuzz, and what it rests upon."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_server.http.middleware import FILES_PATH
from tests.hostile import fuzz
from tests.hostile.fuzz import Target
from tests.hostile.routes import ROUTES, Route
from tests.live.server import eventually

SEED = int(os.environ.get("MLX_SERVER_TEST_SEED", "8"))
COUNT = 8
"""For each route; `scripts/fuzz` goes on from there."""

each_route = pytest.mark.parametrize("route", [pytest.param(r, id=r.path) for r in ROUTES])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("fuzzed")
    with fuzz.target(folder, tiny_path) as target:
        yield target
        assert "Traceback" not in target.server.log
        assert " ERROR " not in target.server.log


def test_these_are_all_routes(target: Target) -> None:
    with target.server.http() as http:
        documented = http.get("/openapi.json").json()["paths"]
    posted = {path for path, methods in documented.items() if "post" in methods}
    assert {route.path for route in ROUTES} == posted - {FILES_PATH}  # its bodies are forms


@each_route
def test_what_is_changed_is_valid_before(target: Target, route: Route) -> None:
    for body in route.valid:
        answer = target.post(target.path(route), json.dumps(body).encode())
        assert answer.status == route.answers, (body, answer)
        fuzz.judge(route, answer)


@each_route
def test_and_uses_every_field(route: Route) -> None:
    names = {field.alias or name for name, field in route.wire_type.model_fields.items()}
    assert {name for body in route.valid for name in body} == names


@each_route
def test_bad_bodies(target: Target, route: Route) -> None:
    failures = list(fuzz.run(target, route, SEED, range(COUNT)))
    assert not failures, "\n\n".join(failures[:5])
    eventually(target.server.idle, "nothing of them is left")
