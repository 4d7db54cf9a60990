"""Bad bodies without end: the short form of scripts/fuzz, and what it rests upon."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.api import wire
from tests.api.wire import ScriptedEngine
from tests.hostile import fuzz
from tests.hostile.bodies import generated, shrunk
from tests.hostile.fuzz import Answer, Target
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
    assert {route.path for route in ROUTES} == {
        path for path, methods in documented.items() if "post" in methods
    }


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


def test_the_same_seed_is_the_same_bodies() -> None:
    route = ROUTES[0]
    bodies = [generated(route, SEED, number) for number in range(50)]
    assert bodies == [generated(route, SEED, number) for number in range(50)]
    assert len(set(bodies)) > 40
    assert bodies != [generated(route, SEED + 1, number) for number in range(50)]


def test_a_failure_is_made_small() -> None:
    body = {"a": [1, {"b": "x", "c": 5}], "d": {"e": None}}
    assert shrunk(body, lambda smaller: "'b'" in str(smaller)) == {"a": [{"b": "x"}]}


CHAT = ROUTES[0]
CHOICE = '{"usage": {"prompt_tokens": 1}, "choices": [{"finish_reason": %s}]}'
JSON, STREAM = "application/json", "text/event-stream"


@pytest.mark.parametrize(
    "answer",
    [
        Answer(500, JSON, b'{"error": {}}'),
        Answer(302, JSON, b""),
        Answer(400, "text/html", b"no"),
        Answer(400, JSON, b'{"detail": "no"}'),
        Answer(503, JSON, b'{"error": "no"}'),
        Answer(200, JSON, b"{"),
        Answer(200, JSON, (CHOICE % "NaN").encode()),
        Answer(200, JSON, (CHOICE % "null").encode()),
        Answer(200, STREAM, b'data: {"id": 1}\n\n'),
        Answer(200, STREAM, b"data: oops\n\ndata: [DONE]\n\n"),
    ],
    ids=lambda answer: f"{answer.status} {answer.content.decode()[:20]!r}",
)
def test_what_is_no_answer(answer: Answer) -> None:
    with pytest.raises((AssertionError, ValueError, LookupError)):
        fuzz.judge(CHAT, answer)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_what_the_openapi_document_promises(tiny_path: Path, path: str) -> None:
    """Of an app of its own: schemathesis stops it after each."""
    from schemathesis import Case, openapi  # seconds, in every process that collects this file
    from schemathesis.checks import not_a_server_error

    app = wire.app(tiny_path, ScriptedEngine(), allowed_hosts=("testserver",))
    documented = openapi.from_asgi("/openapi.json", app)

    @settings(
        max_examples=8,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(case=documented[path]["POST"].as_strategy())
    def never_a_server_error(case: Case[Any]) -> None:
        case.validate_response(case.call(), checks=[not_a_server_error])

    never_a_server_error()
