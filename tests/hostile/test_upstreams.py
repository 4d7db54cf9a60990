"""Whatever an upstream sends, the event loop goes on, and the answer has an end.

`scripts/attack` sends ten times as much, and looks at the server from outside.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from mlx_server.app import create_app, server_of
from mlx_server.config.settings import ModelSettings, ServerSettings, Settings, validated
from tests.hostile.test_loop import TRIES, Watch, is_short, running
from tests.hostile.upstreams import ATTACKS, HostileServer

pytestmark = pytest.mark.alone

BYTES = 200_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HI = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def url(watch: Watch) -> Iterator[str]:
    servers = {name: HostileServer(partial(stream, BYTES)) for name, stream in ATTACKS.items()}
    models: Any = {
        name: {"source": f"openai+{server.url}/v1", "upstream": {"retries": 0}}
        for name, server in servers.items()
    }
    settings = Settings(
        server=ServerSettings(port=0, drain_seconds=0),
        models={name: validated(ModelSettings, model) for name, model in models.items()},
    )
    server = server_of(settings, create_app(settings))
    server.config.loop = "asyncio"
    with running(server, watch) as url:
        yield url
    for each in servers.values():
        each.close()


@pytest.mark.parametrize("name", ATTACKS)
def test_the_loop_goes_on(watch: Watch, url: str, name: str) -> None:
    body = {"model": name, "messages": [HI], "tools": [TOOL]}
    with httpx.Client(base_url=url, trust_env=False, timeout=120) as http:
        first = http.post("/v1/chat/completions", json=body)
        assert first.json()["choices"][0]["message"]["content"] == "Yes"
        for _ in range(TRIES):
            watch.longest = 0.0
            response = http.post("/v1/chat/completions", json=body)
            assert response.status_code in (200, 502), response.text[:300]
            if is_short(watch.longest):
                break
    assert watch.longest > 0
    assert is_short(watch.longest), "\n\n".join(watch.seen)
