"""Batches as the clients of OpenAI and Anthropic send them, and what may befall their servers."""

import asyncio
import errno
import io
import itertools
import json
import os
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO

import anthropic
import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from starlette.requests import Request
from starlette.testclient import TestClient

from mlx_server import limits
from mlx_server.api import batch_runner
from mlx_server.api.handlers import json_response
from mlx_server.config.settings import StoreSettings
from mlx_server.errors import EngineDied, Overloaded
from mlx_server.requests import Tier
from mlx_server.store import contents
from tests.api import batch_server, wire
from tests.api.test_files import anthropic_of, left, sdk
from tests.api.wire import MODEL, ScriptedEngine
from tests.live.server import eventually
from tests.store.make import limit

KEYS = (wire.key("one-key"), wire.key("another-key"), wire.key("third-key"))
CHAT: Any = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 2,
    "messages": [{"role": "user", "content": "a"}],
}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: BODY,
    "/v1/completions": {"model": MODEL, "prompt": "a", "max_tokens": 2},
    "/v1/responses": {"model": MODEL, "input": "a", "max_output_tokens": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def http(tiny_path: Path, engine: ScriptedEngine, folder: Path) -> Iterator[TestClient]:
    store = StoreSettings(data_dir=folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_runner, "LOOK_SECONDS", 0.02)
        patch.setattr(batch_runner, "RETRY_SECONDS", 0.02)
        patch.setattr(batch_runner, "BUSY_SECONDS", 0.01)
        with wire.client(tiny_path, engine, store, api_keys=KEYS) as client:
            yield client


@pytest.fixture
def client(http: TestClient) -> OpenAI:
    return sdk(http)


def line(id: str, url: str = CHAT, **more: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": {**BODIES[url], **more}}


def jsonl(lines: Iterable[Any]) -> bytes:
    texts = (each if isinstance(each, str) else json.dumps(each) for each in lines)
    return "".join(f"{text}\n" for text in texts).encode()


def begun(client: OpenAI, lines: Iterable[Any], endpoint: Any = CHAT, **more: Any) -> Batch:
    file = client.files.create(file=("lines.jsonl", jsonl(lines)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


def ended(client: OpenAI, id: str, seconds: float = 20) -> Batch:
    states = {"completed", "failed", "expired", "cancelled"}
    eventually(lambda: client.batches.retrieve(id).status in states, "its end", seconds)
    return client.batches.retrieve(id)


def lines_of(client: OpenAI, file: str | None) -> list[Any]:
    return (
        [json.loads(each) for each in client.files.content(file).text.splitlines()] if file else []
    )


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_batch_from_its_file_to_its_answers(client: OpenAI, folder: Path, endpoint: Any) -> None:
    metadata = {"for": "a test"}
    lines = [line(f"{i}", endpoint) for i in range(20)] + [line("bad", endpoint, model="no-such")]
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    batch = begun(client, lines, endpoint, metadata=metadata, output_expires_after=expiry)
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", endpoint, metadata)
    assert batch.expires_at == batch.created_at + 86400
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'completed'"):
        client.batches.cancel(batch.id)
    assert batch.completed_at
    assert batch.request_counts
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
    answers = lines_of(client, batch.output_file_id)
    assert sorted(int(each["custom_id"]) for each in answers) == [*range(20)]
    assert len({each["id"] for each in answers}) == 20
    alone = client.post(endpoint, body={**BODIES[endpoint], "store": False}, cast_to=object)
    for each in answers:
        assert each["error"] is None
        response = each["response"]
        assert response["status_code"] == 200
        assert response["request_id"]
        assert response["body"].keys() == dict(alone).keys()  # type: ignore[call-overload]
        assert response["body"]["usage"] == alone["usage"]  # type: ignore[index]
    assert batch.usage
    used = [each["response"]["body"]["usage"] for each in answers]
    assert batch.usage.total_tokens == sum(each["total_tokens"] for each in used) > 0
    assert batch.usage.output_tokens == 20 * 2
    (failed,) = lines_of(client, batch.error_file_id)
    assert failed["custom_id"] == "bad"
    assert failed["response"]["status_code"] == 404
    assert failed["response"]["body"]["error"]["code"] == "model_not_found"
    assert batch.output_file_id
    output = client.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output"
    assert output.expires_at == output.created_at + 3600
    names = {batch.input_file_id, batch.output_file_id, batch.error_file_id}
    assert names == {name for name in left(folder) if name in names}
    assert not [name for name in left(folder) if name.startswith(batch.id)]
    assert batch.id in [each.id for each in client.batches.list(limit=1)]


def test_no_key_sees_the_batches_or_files_of_another(http: TestClient, client: OpenAI) -> None:
    batch = begun(client, [line("a")])
    other = sdk(http, "another-key")
    assert batch.id not in [each.id for each in other.batches.list()]
    for call in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    with pytest.raises(openai.NotFoundError):
        other.batches.create(
            input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
        )
    file = ended(client, batch.id).output_file_id
    assert file
    with pytest.raises(openai.NotFoundError):
        other.files.content(file)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ("{", "invalid_json_line"),
        ('{"custom_id": "a", "body": ' + "[" * 100_000, "invalid_json_line"),
        ("\x00\xff", "invalid_json_line"),
        ("5", "missing_required_parameter"),
        ({"url": CHAT, "method": "POST", "body": {}}, "missing_required_parameter"),
        ({**line("a"), "custom_id": 5}, "missing_required_parameter"),
        ({**line("a"), "custom_id": ""}, "invalid_custom_id"),
        ({**line("a"), "custom_id": "x" * 513}, "invalid_custom_id"),
        (line("same"), "duplicate_custom_id"),
        ({**line("a"), "method": "GET"}, "invalid_method"),
        ({**line("a"), "url": "/v1/embeddings"}, "invalid_url"),
        ({**line("a"), "body": "x"}, "missing_required_parameter"),
        ({**line("a"), "body": None}, "missing_required_parameter"),
        (line("a", padding="x" * (4 << 20)), "line_too_large"),
    ],
    ids=map(str, range(14)),
)
def test_a_file_with_a_wrong_line_fails_and_says_where(
    client: OpenAI, engine: ScriptedEngine, wrong: Any, code: str
) -> None:
    taken = len(engine.taken)
    lines = [f"\ufeff{json.dumps(line('same'))}", "", wrong, line("last")]
    batch = ended(client, begun(client, lines).id)
    assert batch.status == "failed"
    assert batch.errors
    assert batch.errors.data
    assert [(each.code, each.line) for each in batch.errors.data] == [(code, 3)]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert len(engine.taken) == taken, "nothing of it was answered"


def test_files_that_are_no_batch(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ended(client, begun(client, []).id)
    assert batch.errors
    assert batch.errors.data
    assert batch.errors.data[0].code == "empty_file"
    limit(monkeypatch, "BATCH_LINES", 2)
    batch = ended(client, begun(client, [line(f"{i}") for i in range(3)]).id)
    assert batch.errors
    assert batch.errors.data
    assert batch.errors.data[0].code == "too_many_requests"
    for purpose in ("vision", "user_data"):
        file = client.files.create(file=("f", jsonl([line("a")])), purpose=purpose)
        with pytest.raises(openai.BadRequestError, match="needs `batch`"):
            client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    client.files.delete(file.id)
    for id in (file.id, "file-none", "../../etc/passwd"):
        with pytest.raises(openai.NotFoundError):
            client.batches.create(input_file_id=id, endpoint=CHAT, completion_window="24h")
    wrong: Any
    for wrong in ({"endpoint": "/v1/images/edits"}, {"completion_window": "7d"}):
        asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **wrong}
        with pytest.raises(openai.BadRequestError):
            client.batches.create(**asked)


def test_what_has_no_place_in_a_batch(client: OpenAI) -> None:
    lines = [line("stream", stream=True), line("none", max_tokens="x")]
    batch = ended(client, begun(client, lines).id)
    failed = {each["custom_id"]: each["response"] for each in lines_of(client, batch.error_file_id)}
    assert failed["stream"]["body"]["error"]["param"] == "stream"
    assert failed["none"]["body"]["error"]["param"] == "max_tokens"
    lines = [
        line("back", "/v1/responses", background=True),
        line("kept", "/v1/responses", store=True),
    ]
    lines += [line("not", "/v1/responses"), line("null", "/v1/responses", store=None)]
    batch = ended(client, begun(client, lines, "/v1/responses").id)
    (failed_line,) = lines_of(client, batch.error_file_id)
    assert failed_line["response"]["body"]["error"]["param"] == "background"
    answers = {
        each["custom_id"]: each["response"] for each in lines_of(client, batch.output_file_id)
    }
    assert client.responses.retrieve(answers["kept"]["body"]["id"]).status
    for unkept in ("not", "null"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answers[unkept]["body"]["id"])


@pytest.mark.parametrize("endpoint", BODIES)
def test_all_lines_have_the_tier_of_a_batch(
    client: OpenAI, engine: ScriptedEngine, endpoint: Any
) -> None:
    """OpenAI has no name for it."""
    taken = len(engine.taken)
    lines = [line("a", endpoint), line("b", endpoint, service_tier="priority")]
    batch = ended(client, begun(client, lines, endpoint).id)
    assert [each.tier for each in engine.taken[taken:]] == [Tier.BATCH] * 2
    for each in lines_of(client, batch.output_file_id):
        assert each["response"]["body"].get("service_tier") in (None, "default")


def test_there_is_room_for_few_batches(
    http: TestClient,
    client: OpenAI,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(monkeypatch, "BATCHES", 4)
    engine.silent = True
    ids = [begun(client, [line("a")]).id for _ in range(2)]
    with pytest.raises(openai.APIStatusError, match="Too many batches") as refused:
        begun(client, [line("a")])
    assert refused.value.status_code == 503
    other = sdk(http, "another-key")
    own = [begun(other, [line("a")]).id for _ in range(2)]
    with pytest.raises(openai.APIStatusError, match="Too many batches"):
        begun(sdk(http, "third-key"), [line("a")])
    for asking, begun_ids in ((client, ids), (other, own)):
        for id in begun_ids:
            asking.batches.cancel(id)
            ended(asking, id)
    engine.silent = False
    ended(client, begun(client, [line("a")]).id)


def test_a_batch_that_fails_lists_few_errors(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "BATCH_ERRORS", 2)
    for wrong in (1, 2, 3):
        batch = ended(client, begun(client, ["{"] * wrong).id)
        assert batch.errors
        assert len(batch.errors.data or []) == min(wrong, 2)


def test_a_batch_outlives_its_input_file(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.silent = True
    try:
        batch = begun(client, [line(f"{i}") for i in range(50)])
        client.files.delete(batch.input_file_id)
        client.batches.cancel(batch.id)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        batch = ended(client, batch.id)
    finally:
        engine.silent = False
    assert batch.status == "cancelled"
    assert batch.cancelled_at
    answers = [*lines_of(client, batch.output_file_id), *lines_of(client, batch.error_file_id)]
    assert sorted(int(each["custom_id"]) for each in answers) == [*range(50)]
    codes = {each["error"]["code"] for each in lines_of(client, batch.error_file_id)}
    assert codes == {"batch_cancelled"}


@pytest.mark.parametrize("reason", ["expired", "full"])
def test_a_batch_that_is_not_answered_in_time_or_in_its_bytes(
    client: OpenAI, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    engine.silent = True
    if reason == "expired":
        monkeypatch.setattr("mlx_server.api.batches.WINDOW_SECONDS", -1)
    else:
        limit(monkeypatch, "FILE_BYTES", -1)
        monkeypatch.setattr(limits, "FILES_BYTES", 1 << 40)
    engine.silent = True
    file = jsonl([line(f"{i}") for i in range(5)])
    if reason == "full":
        monkeypatch.undo()
    id = client.files.create(file=("f", file), purpose="batch").id
    if reason == "full":
        limit(monkeypatch, "FILE_BYTES", -1)
    batch = client.batches.create(input_file_id=id, endpoint=CHAT, completion_window="24h")
    batch = ended(client, batch.id)
    engine.silent = False
    assert batch.status == ("expired" if reason == "expired" else "completed")
    monkeypatch.undo()
    failed = lines_of(client, batch.error_file_id)
    assert [each["custom_id"] for each in failed] == [f"{i}" for i in range(5)]
    code = {"expired": "batch_expired", "full": "batch_too_large"}[reason]
    assert {each["error"]["code"] for each in failed} == {code}


class FullDisk(io.FileIO):
    """Has room for half a line now and then."""

    writes = itertools.count()

    def write(self, data: Any) -> int:
        if next(self.writes) % 5 == 3:
            super().write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def test_a_full_disk_delays_a_batch(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on once there is room, with no half line in its answers."""
    resume = contents.Contents.resume

    def full(self: contents.Contents, name: str) -> BinaryIO:
        with resume(self, name) as file:
            return FullDisk(os.dup(file.fileno()), "r+b")

    monkeypatch.setattr(contents.Contents, "resume", full)
    batch = ended(client, begun(client, [line(f"{i}") for i in range(20)]).id)
    assert batch.status == "completed"
    answers = [each["custom_id"] for each in lines_of(client, batch.output_file_id)]
    assert sorted(map(int, answers)) == [*range(20)]


def test_a_busy_server_is_asked_again(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([Overloaded("busy")] * 20 + [EngineDied("dead")] * 2)
    answer = batch_runner.ENDPOINTS[CHAT]

    async def endpoint(http: Request) -> Any:
        for error in busy:
            raise error
        return await answer(http)

    monkeypatch.setitem(batch_runner.ENDPOINTS, CHAT, endpoint)
    batch = ended(client, begun(client, [line("a")]).id)
    (answered,) = lines_of(client, batch.output_file_id)
    assert answered["response"]["status_code"] == 200
    assert not [*busy]


def test_a_batch_of_messages(http: TestClient, folder: Path) -> None:
    client = anthropic_of(http)
    params: Any = BODY
    requests: Any = [{"custom_id": f"id-{i}", "params": params} for i in range(5)]
    requests.append({"custom_id": "bad", "params": {**params, "max_tokens": -1}})
    batch = client.messages.batches.create(requests=requests)
    assert batch.processing_status == "in_progress"
    assert batch.request_counts.processing == 6
    with pytest.raises(anthropic.AnthropicError):
        client.messages.batches.results(batch.id)
    eventually(
        lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended", "the end"
    )
    batch = client.messages.batches.retrieve(batch.id)
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 5, 1)
    results = {each.custom_id: each.result for each in client.messages.batches.results(batch.id)}
    alone = client.messages.create(**params)
    for i in range(5):
        result = results.pop(f"id-{i}")
        assert result.type == "succeeded"
        assert result.message.content == alone.content
        assert result.message.usage == alone.usage.model_copy(update={"service_tier": "batch"})
    assert results["bad"].type == "errored"
    assert results["bad"].error.error.type == "invalid_request_error"
    second = client.messages.batches.create(requests=requests[:1])
    assert [each.id for each in client.messages.batches.list(limit=2)][:2] == [second.id, batch.id]
    page = client.messages.batches.list(before_id=batch.id, limit=1000)
    assert [each.id for each in page.data] == [second.id]
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    assert not [name for name in left(folder) if name.startswith(batch.id)]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_a_batch_of_messages_that_is_cancelled(http: TestClient, engine: ScriptedEngine) -> None:
    client = anthropic_of(http)
    params: Any = BODY
    requests: Any = [{"custom_id": f"{i}", "params": params} for i in range(40)]
    engine.silent = True
    batch = client.messages.batches.create(requests=requests)
    with pytest.raises(anthropic.BadRequestError, match="Cancel it first"):
        client.messages.batches.delete(batch.id)
    batch = client.messages.batches.cancel(batch.id)
    assert batch.processing_status == "canceling"
    assert batch.cancel_initiated_at
    eventually(
        lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended", "the end"
    )
    engine.silent = False
    batch = client.messages.batches.retrieve(batch.id)
    assert batch.request_counts.canceled == 40
    types = Counter(each.result.type for each in client.messages.batches.results(batch.id))
    assert types == {"canceled": 40}
    wrong: Any
    for wrong in (
        [],
        [{"custom_id": "a b", "params": params}],
        [{"custom_id": "x" * 65, "params": params}],
        [{"custom_id": "a", "params": params}] * 2,
        [{"custom_id": "a", "params": 5}],
    ):
        with pytest.raises(anthropic.BadRequestError):
            client.messages.batches.create(requests=wrong)


# A server that dies


LINES = 400
KILLS = 100


def test_each_line_is_answered_once_however_often_servers_are_killed(
    tmp_path: Path, tiny_path: Path, engine: ScriptedEngine
) -> None:
    store = StoreSettings(data_dir=tmp_path)
    lines = [line(f"{i}", padding=i) for i in range(LINES)] + [line("bad", model="no-such")]
    engine.silent = True
    with wire.client(tiny_path, engine, store) as http:
        batches = [begun(sdk(http), lines).id for _ in range(2)]
    engine.silent = False
    context = get_context("forkserver")
    context.set_forkserver_preload([batch_server.__name__])
    rng = random.Random(46)
    for _ in range(KILLS):
        read, write = context.Pipe(duplex=False)
        process = context.Process(target=batch_server.serve, args=(tmp_path, write))
        process.start()
        write.close()
        read.recv()
        process.join(rng.random() ** 2 * 0.03)
        process.kill()
        process.join()
    assert any(name.endswith(".input") for name in left(tmp_path)), "it needs more lines"
    with wire.client(tiny_path, engine, store) as http:
        client = sdk(http)
        for id in batches:
            batch = ended(client, id)
            answers = [each["custom_id"] for each in lines_of(client, batch.output_file_id)]
            assert sorted(map(int, answers)) == [*range(LINES)]
            (failed,) = lines_of(client, batch.error_file_id)
            assert failed["custom_id"] == "bad"
            assert batch.request_counts
            assert batch.request_counts.completed == LINES
        sweep: Any = http.app.state.runs.store.sweep  # type: ignore[attr-defined]
        assert http.portal
        http.portal.call(sweep)
        known = {file.id for file in client.files.list()}
    assert {*left(tmp_path)} == known


def test_a_living_server_goes_on_with_the_batch_of_one_that_dies(
    tmp_path: Path, tiny_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(request: Request) -> Any:
        await asyncio.Event().wait()

    async def quick(request: Request) -> Any:
        return json_response({"said": "by the other"})

    store = StoreSettings(data_dir=tmp_path)
    monkeypatch.setitem(batch_runner.ENDPOINTS, CHAT, never)
    with wire.client(tiny_path, engine, store) as http:
        id = begun(sdk(http), (line(f"{i}", padding=1) for i in range(3000))).id
    context = get_context("forkserver")
    read, write = context.Pipe(duplex=False)
    dying = context.Process(target=batch_server.serve, args=(tmp_path, write))
    dying.start()
    read.recv()
    monkeypatch.setitem(batch_runner.ENDPOINTS, CHAT, quick)
    with wire.client(tiny_path, engine, store) as http:
        client = sdk(http)

        def begun_there() -> bool:
            counts = client.batches.retrieve(id).request_counts
            return counts is not None and counts.completed > 10

        eventually(begun_there, "the first server answers")
        dying.kill()
        dying.join()
        answers = lines_of(client, ended(client, id, 60).output_file_id)
    assert sorted(int(each["custom_id"]) for each in answers) == [*range(3000)]
    by_other = [
        "said" in a["response"]["body"] and " " in a["response"]["body"]["said"] for a in answers
    ]
    assert 10 < by_other.count(False) < 3000


def test_many_lines_take_little_memory(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, padding = 10_000, "x" * 2000

    async def endpoint(request: Request) -> Any:
        return json_response({"padding": (await request.json())["padding"]})

    monkeypatch.setitem(batch_runner.ENDPOINTS, CHAT, endpoint)
    client = sdk(http)
    content = jsonl(line(f"{i}", padding=padding) for i in range(lines))
    size = len(content)
    file = client.files.create(file=("many.jsonl", content), purpose="batch").id
    del content
    tracemalloc.start()
    try:
        batch = client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
        batch = ended(client, batch.id, 60)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert batch.request_counts
    assert batch.request_counts.completed == lines
    assert batch.output_file_id
    assert client.files.retrieve(batch.output_file_id).bytes > lines * len(padding)
    assert peak < 10 << 20 < size // 2
