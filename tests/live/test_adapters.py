"""LoRA adapters on a real server: two with random weights, next to a base that has such too.

What the adapters say that are shipped is in their README, whose blocks test_documents.py runs.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.live.server import PLAIN, TINY, LiveServer, eventually, serving
from tests.tiny import ENDOFTEXT, IM_END
from tests.worker.lora_files import mlx_adapter

ONE, OTHER = "one", "other"
CAPITALS = ("France", "Japan")
WHICH = (None, ONE, OTHER)
TOKENS = 10
ENDLESS = {"extra_body": {"logit_bias": {str(end): -100 for end in (ENDOFTEXT, IM_END)}}}
NAMED = {"parrot": {"path": "./adapters/one"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapted")


@pytest.fixture(scope="module")
def server(folder: Path, tiny_path: Path) -> Iterator[LiveServer]:
    for seed, name in enumerate((ONE, OTHER)):
        mlx_adapter(folder / "adapters" / name, tiny_path, seed=seed)
    shutil.copytree(folder / "adapters" / ONE, folder / "elsewhere" / "corsair")
    broken = folder / "adapters" / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{")
    config = {
        "server": {"adapter_dirs": ["./elsewhere"]},
        "models": {TINY: {"source": str(tiny_path), "adapters": NAMED}},
    }
    with serving(folder, config) as server:
        yield server
        assert "Traceback" not in server.log


def question(country: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is the capital of {country}?"}]


def asking(country: str, adapter: str | None, **more: Any) -> dict[str, Any]:
    model = f"{TINY}:{adapter}" if adapter else TINY
    return {
        "model": model,
        "messages": question(country),
        "temperature": 0,
        "max_tokens": TOKENS,
        **more,
    }


def asked(client: OpenAI, country: str, adapter: str | None, **more: Any) -> Any:
    return client.chat.completions.create(**asking(country, adapter, **more))


def text(completion: Any) -> str:
    found: str = completion.choices[0].message.content
    return found


def streamed(chunks: Any) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


@pytest.fixture(scope="module")
def alone(client: OpenAI) -> dict[tuple[str, str | None], str]:
    """Every answer, given by itself, and one of an adapter streamed too."""
    answers = {(c, a): text(asked(client, c, a)) for c in CAPITALS for a in WHICH}
    again = asked(client, CAPITALS[0], ONE, stream=True)
    assert streamed(again) == answers[CAPITALS[0], ONE]
    return answers


def test_every_answer_is_another(alone: dict[tuple[str, str | None], str]) -> None:
    assert len({*alone.values()}) == len(CAPITALS) * len(WHICH)


def test_out_of_one_batch(server: LiveServer, alone: dict[tuple[str, str | None], str]) -> None:
    async def together() -> list[str]:
        async with server.openai_async() as client:
            found = await asyncio.gather(
                *(client.chat.completions.create(**asking(*which)) for which in alone)
            )
            return [text(each) for each in found]

    assert asyncio.run(together()) == list(alone.values())


def test_one_prompt_under_three_adapters_with_the_prompt_cache_on(client: OpenAI) -> None:
    """What was computed under one is used under no other."""
    country = "a country that nobody asked for before"
    first = [asked(client, country, adapter, max_tokens=6) for adapter in WHICH]
    again = [asked(client, country, adapter, max_tokens=6) for adapter in WHICH]
    for one, two in zip(first, again, strict=True):
        assert text(one) == text(two)
        assert two.usage.prompt_tokens_details.cached_tokens > 0
    assert len({text(each) for each in first}) == 3
    cached = [each.usage.prompt_tokens_details.cached_tokens for each in first]
    elsewhere = asked(client, "another such country", None, max_tokens=1)
    shared = elsewhere.usage.prompt_tokens_details.cached_tokens
    assert max(cached) <= shared, "no more than what all prompts share"


@pytest.mark.parametrize("name", ["adapter", "adapters", "adapter_path", "lora_path"])
def test_by_its_folder_under_any_name(
    client: OpenAI, folder: Path, alone: dict[tuple[str, str | None], str], name: str
) -> None:
    path = folder / "adapters" / ONE
    found = asked(client, "France", None, extra_body={name: str(path)})
    assert text(found) == alone["France", ONE]
    weights = path / "adapters.safetensors"
    with pytest.raises(openai.BadRequestError, match="Give the folder that it is in") as caught:
        asked(client, "France", None, extra_body={name: str(weights)})
    assert caught.value.code == "adapter_invalid"


def test_they_are_listed_with_what_the_model_can_do(server: LiveServer) -> None:
    with server.http() as http:
        found = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert found[f"{TINY}:{ONE}"]["capabilities"] == found[TINY]["capabilities"]


def test_one_that_is_wrong_is_told_and_harms_nobody(client: OpenAI) -> None:
    with closing(asked(client, "France", ONE, stream=True, max_tokens=200, **ENDLESS)) as running:
        next(iter(running))
        with pytest.raises(openai.BadRequestError) as caught:
            asked(client, "France", "broken")
        assert caught.value.code == "adapter_invalid"
        next(iter(running))


def post(server: LiveServer, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    with server.http() as http:
        answer = http.post(path, json=body)
    found: dict[str, Any] = answer.json()
    return answer.status_code, found


def test_load_and_unload_while_it_runs(
    server: LiveServer, client: OpenAI, folder: Path, alone: dict[tuple[str, str | None], str]
) -> None:
    path = str(folder / "elsewhere" / "corsair")
    status, found = post(server, "/v1/load_lora_adapter", lora_name="captain", lora_path=path)
    assert (status, found["id"]) == (200, f"{TINY}:captain")
    assert text(asked(client, "France", "captain")) == alone["France", ONE]
    with closing(
        asked(client, "France", "captain", stream=True, max_tokens=400, **ENDLESS)
    ) as running:
        next(iter(running))
        status, _ = 0, None

        async def unload_meanwhile() -> int:
            unloading = asyncio.to_thread(
                post, server, "/v1/unload_lora_adapter", lora_name="captain"
            )
            rest = asyncio.to_thread(streamed, running)
            answer, said = await asyncio.gather(unloading, rest)
            assert said, "its rows have had their time"
            return int(answer[0])

        assert asyncio.run(unload_meanwhile()) == 200
    with pytest.raises(openai.NotFoundError):
        asked(client, "France", "captain")


def test_a_storm_of_loads_and_unloads_gives_the_right_answer_or_none(
    server: LiveServer, folder: Path, alone: dict[tuple[str, str | None], str]
) -> None:
    rounds = 2
    body = {"lora_name": "storm", "lora_path": str(folder / "elsewhere" / "corsair")}
    one = alone["France", ONE]

    async def changing(http: httpx.AsyncClient, route: str) -> None:
        for _ in range(5 * rounds):
            answer = await http.post(f"/v1/{route}_lora_adapter", json=body)
            assert answer.status_code in (200, 404), answer.text

    async def asking_for_it(http: httpx.AsyncClient, name: str) -> None:
        for _ in range(rounds):
            question = asking("France", name, max_tokens=2)
            answer = await http.post("/v1/chat/completions", json=question)
            if answer.status_code == 200:
                assert one.startswith(answer.json()["choices"][0]["message"]["content"])
            else:
                assert answer.status_code == 404, answer.text
                assert answer.json()["error"]["code"] == "adapter_not_found"

    async def storm() -> None:
        async with httpx.AsyncClient(**PLAIN, base_url=server.url, timeout=60) as http:
            routes = [changing(http, route) for route in ("load", "unload", "load", "unload")]
            await asyncio.gather(*routes, *(asking_for_it(http, "storm") for _ in range(6)))
            await http.post("/v1/unload_lora_adapter", json=body)

    asyncio.run(storm())
    eventually(server.idle, "nothing is left of it")


def test_a_folder_that_is_replaced_is_noticed(
    server: LiveServer, client: OpenAI, folder: Path, alone: dict[tuple[str, str | None], str]
) -> None:
    place = folder / "adapters" / "changing"
    shutil.copytree(folder / "adapters" / ONE, place)
    assert text(asked(client, "France", "changing")) == alone["France", ONE]
    shutil.rmtree(place)
    shutil.copytree(folder / "adapters" / OTHER, place)
    assert text(asked(client, "France", "changing")) == alone["France", OTHER]
    with closing(
        asked(client, "France", "changing", stream=True, max_tokens=60, **ENDLESS)
    ) as running:
        next(iter(running))
        shutil.rmtree(place)  # in use
        assert json.loads(json.dumps(streamed(running)))
    with pytest.raises(openai.NotFoundError):
        asked(client, "France", "changing")
    eventually(server.idle, "nothing is left of it")


def test_a_scale(client: OpenAI, alone: dict[tuple[str, str | None], str]) -> None:
    none = asked(client, "France", ONE, extra_body={"adapter_scale": 0})
    assert text(none) == alone["France", None]
    half = asked(client, "France", ONE, extra_body={"adapter_scale": 0.5})
    assert text(half) != text(asked(client, "France", ONE, extra_body={"adapter_scale": 3}))
    for scale in (-0.1, 4.1, "1", True):
        with pytest.raises(openai.BadRequestError) as caught:
            asked(client, "France", ONE, extra_body={"adapter_scale": scale})
        assert caught.value.param == "adapter_scale"
