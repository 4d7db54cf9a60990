"""A model that sees is shown the pictures of each API's messages."""

import base64
import json
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from starlette.testclient import TestClient

from mlx_server import limits, messages
from mlx_server.engine.messages import FIRST_MEDIA_ID, Generate, media_ids
from mlx_server.generation import pictures
from mlx_server.models.vision import can_see
from mlx_server.pool.pool import PixelSlots, Pool
from tests.api import wire
from tests.api.wire import MODEL, ScriptedEngine
from tests.hostile.upstreams import RawServer
from tests.tiny_vision import tiny_vision

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")
pytestmark = pytest.mark.skipif(not can_see(), reason="the extra `vision` is not installed")

Json = dict[str, Any]
BEGIN, END = 259, 261
IGNORED = "x-mlx-server-ignored"


def png(colour: tuple[int, int, int] = (200, 10, 20), size: tuple[int, int] = (90, 60)) -> str:
    file = BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


PNG, OTHER = png(), png((0, 0, 255))
URL, URL_OF_OTHER = f"data:image/png;base64,{PNG}", f"data:image/png;base64,{OTHER}"
TOKENS = 6
"""Of such a picture: two rows of three."""
DIGEST = sha256(b"96 64 " + bytes((200, 10, 20)) * 96 * 64).digest()


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def client(
    engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestClient]:
    with wire.client(tiny_vision(tmp_path_factory.mktemp("vision")), engine) as client:
        yield client


def chat(*parts: Any, before: tuple[Json, ...] = (), **options: Any) -> Json:
    messages = [*before, {"role": "user", "content": list(parts)}]
    return {"model": MODEL, "max_tokens": 4, "messages": messages, **options}


def seen(url: Any = URL) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}


def words(text: str) -> Json:
    return {"type": "text", "text": text}


def ask(client: TestClient, engine: ScriptedEngine, path: str, body: Json) -> tuple[Generate, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return engine.taken[-1], answer


BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
CALLED = [
    {"role": "user", "content": "look"},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "call_1", "name": "look", "input": {}}],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": [BLOCK]}],
    },
]
VIEWED = [
    {"type": "message", "role": "user", "content": "look"},
    {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"},
    {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_image", "image_url": URL}],
    },
]

REQUESTS: dict[str, tuple[str, Json]] = {
    "chat": ("/v1/chat/completions", chat(words("look "), seen(), words(" there"))),
    "chat, bare": ("/v1/chat/completions", chat({"type": "image_url", "image_url": URL})),
    "responses": (
        "/v1/responses",
        {
            "model": MODEL,
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}],
        },
    ),
    "responses, a result": ("/v1/responses", {"model": MODEL, "input": VIEWED}),
    "messages": (
        "/v1/messages",
        {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": [BLOCK]}]},
    ),
    "messages, a result": ("/v1/messages", {"model": MODEL, "max_tokens": 4, "messages": CALLED}),
    "ollama": (
        "/api/chat",
        {
            "model": MODEL,
            "stream": False,
            "messages": [{"role": "user", "content": "look", "images": [PNG]}],
        },
    ),
    "ollama, generate": (
        "/api/generate",
        {"model": MODEL, "stream": False, "prompt": "look", "images": [PNG]},
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_picture_of_each_api_is_shown(
    client: TestClient, engine: ScriptedEngine, name: str
) -> None:
    row, answer = ask(client, engine, *REQUESTS[name])
    (picture,) = row.pictures
    assert (picture.sizes, picture.digest) == ([(96, 64)], DIGEST)
    assert set(zip(*[iter(picture.pixels)] * 3, strict=True)) == {(200, 10, 20)}
    assert row.prompt[picture.at - 1] == BEGIN
    assert row.prompt[picture.at : picture.at + TOKENS] == media_ids(DIGEST, TOKENS)
    assert row.prompt[picture.at + TOKENS] == END
    assert IGNORED not in answer.headers or "image" not in answer.headers[IGNORED]


def test_ollamas_clients_are_told_that_it_sees(client: TestClient) -> None:
    (model,) = client.get("/api/tags").json()["models"]
    shown = client.post("/api/show", json={"model": MODEL}).json()
    assert "vision" in model["capabilities"]
    assert "vision" in shown["capabilities"]


def test_texts_and_pictures_are_in_their_order(client: TestClient, engine: ScriptedEngine) -> None:
    body = chat(words("a"), seen(), seen(URL_OF_OTHER), words("b"), words("c"), seen())
    row, answer = ask(client, engine, "/v1/chat/completions", body)
    text = [id for id in row.prompt if id < FIRST_MEDIA_ID]
    alone, _ = ask(client, engine, "/v1/chat/completions", chat(words("a"), words("b\nc")))
    between = [id for id in text if id not in (BEGIN, END)]
    assert len(between) == len(alone.prompt) - 1, "only texts are on lines of their own"
    first, second, third = row.pictures
    assert first.digest == third.digest != second.digest
    assert [p.at for p in row.pictures] == sorted(p.at for p in row.pictures)
    assert answer.json()["usage"]["prompt_tokens"] == len(row.prompt) == len(text) + 3 * TOKENS


def test_pictures_count_where_tokens_are_counted(
    client: TestClient, engine: ScriptedEngine
) -> None:
    messages = chat(words("look"), seen())["messages"]
    row, _ = ask(client, engine, "/v1/chat/completions", chat(words("look"), seen()))
    counted = client.post("/tokenize", json={"model": MODEL, "messages": messages}).json()
    assert counted["count"] == len(row.prompt)
    assert counted["tokens"].count(BEGIN + 1) == TOKENS, "an image token is shown as its own id"
    body = {"model": MODEL, "messages": [{"role": "user", "content": [BLOCK]}]}
    row, _ = ask(client, engine, "/v1/messages", {**body, "max_tokens": 4})
    counted = client.post("/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": len(row.prompt)}
    assert IGNORED not in counted.headers


WRITTEN = {
    "internvl_chat": f"look<img>{'<IMG_CONTEXT>' * 12}</img>\nthere",
    "kimi_vl": f"<|media_start|>image<|media_content|>{'<|media_pad|>' * 12}<|media_end|>there",
    "glm_ocr": f"look<|begin_of_image|>{'<|image|>' * 6}<|end_of_image|>there",
    "llava": f"look{'<image>' * 9}\nthere",
    "molmo": f"look<im_start>{'<im_patch>' * 3}<im_col>",
    "gemma3": f"look\n\n<start_of_image>{'<image_soft_token>' * 16}<end_of_image>\n\nthere",
    "paligemma": f"{'<image>' * 16}<|im_start|>look\nthere\n",
    "mistral3": f"look{'[IMG][IMG][IMG][IMG][IMG_BREAK]' * 2}[IMG][IMG][IMG][IMG][IMG_END]there",
}


@pytest.mark.parametrize("family", WRITTEN)
def test_the_text_around_a_picture_is_its_familys(
    engine: ScriptedEngine, tmp_path: Path, family: str
) -> None:
    config = json.loads((tiny_vision(tmp_path, family) / "config.json").read_text())
    for name in {"internvl_chat": ["image_token_index"], "molmo": ["image_patch_id"]}.get(
        family, []
    ):
        del config[name]  # the id is in its tokenizer alone
    if family == "paligemma":  # it has no chat template
        (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|im_start|>"}')
    (tmp_path / "config.json").write_text(json.dumps(config))
    with wire.client(tmp_path, engine) as client:
        body = chat(words("look"), seen(), words("there"))
        ask(client, engine, "/v1/chat/completions", body)
        tokens = client.post("/tokenize", json={"model": MODEL, "messages": body["messages"]})
        given = {"model": MODEL, "tokens": tokens.json()["tokens"]}
        text = client.post("/detokenize", json=given).json()["prompt"]
    assert WRITTEN[family] in text


def test_prompts_share_nothing_whose_tokens_all_see_each_other(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    tiny_vision(tmp_path, "paligemma")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|im_start|>"}')
    room = limits.PREFIX_TOKENS - len("<\n")  # a token each
    with wire.client(tmp_path, engine) as client:
        bodies = [chat(words(text * (room // 2)), seen()) for text in ("ab", "ac", "ab")]
        rows = [ask(client, engine, "/v1/chat/completions", body)[0] for body in bodies]
        longer = chat(words("ab" * (room // 2 + 1)), seen())
        refused = client.post("/v1/chat/completions", json=longer)
    assert rows[0].prompt == rows[2].prompt
    assert not {*rows[0].prompt[:16]}.intersection(rows[1].prompt)
    assert len({row.pictures[0].own_digest for row in rows}) == 1
    assert refused.status_code == 400
    assert (
        f"the limit of a model whose tokens all see each other is {limits.PREFIX_TOKENS}"
        in (refused.json()["error"]["message"])
    )


def test_text_can_not_spell_a_picture(client: TestClient, engine: ScriptedEngine) -> None:
    spelled = "<|vision_start|><|image_pad|><|vision_end|>"
    row, _ = ask(
        client, engine, "/v1/chat/completions", chat(words(spelled), seen(), words(spelled))
    )
    assert len(row.pictures) == 1
    assert sum(id >= FIRST_MEDIA_ID for id in row.prompt) == TOKENS
    row, _ = ask(client, engine, "/v1/chat/completions", chat(words(spelled)))
    assert not {BEGIN, BEGIN + 1, END}.intersection(row.prompt)


def test_a_low_detail_is_a_smaller_picture(client: TestClient, engine: ScriptedEngine) -> None:
    large = f"data:image/png;base64,{png(size=(400, 400))}"
    row, _ = ask(client, engine, "/v1/chat/completions", chat(seen(large)))
    ((width, height),) = row.pictures[0].sizes
    assert width * height <= 65536, "as the checkpoint says"
    part = {"type": "image_url", "image_url": {"url": large, "detail": "low"}}
    row, _ = ask(client, engine, "/v1/chat/completions", chat(part))
    assert row.pictures[0].tokens <= limits.LOW_DETAIL_TOKENS


def test_models_that_see_are_named(client: TestClient) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert model["architecture"]["input_modalities"] == ["text", "image"]


def test_a_checkpoint_without_the_weights_of_its_tower_reads_text(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    file = str(tiny_vision(tmp_path) / "model.safetensors")
    tensors: dict[str, mx.array] = mx.load(file)  # type: ignore[assignment]
    text = {name: array for name, array in tensors.items() if "vision" not in name}
    mx.save_safetensors(file, text, metadata={"format": "mlx"})
    with wire.client(tmp_path, engine) as client:
        row, answer = ask(client, engine, "/v1/chat/completions", chat(words("look"), seen()))
        assert not row.pictures
        assert answer.headers[IGNORED] == "messages.content.image_url"
        (model,) = client.get("/v1/models").json()["data"]
    assert model["architecture"]["input_modalities"] == ["text"]


DAMAGED = f"data:image/png;base64,{PNG[: len(PNG) // 2 // 4 * 4]}"
HEIC = base64.b64encode(b"\0\0\0\x18ftypheic" + bytes(100)).decode()
REFUSED = {
    "damaged": (DAMAGED, "is damaged"),
    "no picture": ("data:image/png;base64,aGVsbG8=", "is no PNG"),
    "HEIC": (f"data:image/heic;base64,{HEIC}", "sips"),
    "no base64": ("data:image/png;base64,###", "is not base64"),
    "not encoded": ("data:image/svg+xml,<svg/>", "is not base64"),
    "elsewhere": ("https://example.com/a.png", "data: URL"),
    "a file": ("file:///etc/passwd", "data: URL"),
    "nothing": ("", "data: URL"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_picture_that_can_not_be_shown_is_refused_in_a_question_only(
    client: TestClient, engine: ScriptedEngine, name: str
) -> None:
    url, why = REFUSED[name]
    refused = client.post("/v1/chat/completions", json=chat(words("look"), seen(url)))
    assert refused.status_code == 400
    assert why in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "messages.content.image_url"
    history = (
        {"role": "user", "content": [words("look"), seen(url)]},
        {"role": "assistant", "content": "I see."},
    )
    row, answer = ask(client, engine, "/v1/chat/completions", chat(seen(), before=history))
    assert len(row.pictures) == 1
    assert answer.headers[IGNORED] == "messages.content.image_url"


def test_pictures_of_a_request_have_a_limit(client: TestClient, engine: ScriptedEngine) -> None:
    most = limits.PICTURES
    too_many = client.post("/v1/chat/completions", json=chat(*[seen()] * (most + 1)))
    assert too_many.status_code == 400
    assert f"the limit is {most}" in too_many.json()["error"]["message"]
    turn = (
        {"role": "user", "content": [seen(URL_OF_OTHER)]},
        {"role": "assistant", "content": "?"},
    )
    row, _ = ask(client, engine, "/v1/chat/completions", chat(*[seen()] * most, before=turn))
    assert [each.digest for each in row.pictures] == [DIGEST] * most
    row, _ = ask(client, engine, "/v1/chat/completions", chat(*[seen()] * (most - 1), before=turn))
    assert row.pictures[0].digest != DIGEST


def test_a_message_of_many_pictures_is_put_together_once(
    client: TestClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def noted(parts: Sequence[Any]) -> str:
        counted.append(len(parts))
        return messages.content_of(parts)

    monkeypatch.setattr(pictures, "content_of", noted)
    many = {"role": "user", "content": [seen(URL_OF_OTHER)] * 30}
    before = (many, {"role": "assistant", "content": "I see."})
    row, _ = ask(client, engine, "/v1/chat/completions", chat(seen(), before=before))
    assert len(row.pictures) == limits.PICTURES
    assert sorted(counted) == [1, 30]


def test_the_pixels_of_all_requests_have_a_limit(
    client: TestClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_one = 96 * 64 * 3
    monkeypatch.setattr(limits, "PIXEL_BYTES", 3 * of_one)
    pool: Pool = client.app.state.pool  # type: ignore[attr-defined]
    monkeypatch.setattr(pool, "pixel_slots", PixelSlots())
    two = chat(seen(), seen(URL_OF_OTHER), seen(), n=2)
    ask(client, engine, "/v1/chat/completions", two)
    four = [seen(f"data:image/png;base64,{png((0, shade, 0))}") for shade in (0, 80, 160, 240)]
    more = client.post("/v1/chat/completions", json=chat(*four))
    assert (more.status_code, "pictures" in more.json()["error"]["message"]) == (400, True)
    with pool.pixel_slots.take(3 * of_one, "another"):
        ask(client, engine, "/v1/chat/completions", chat(seen()))
        full = client.post("/v1/chat/completions", json=two)
        assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")
        assert int(full.headers["retry-after"]) > 0
    assert pool.pixel_slots.taken == 0


class Elsewhere(RawServer):
    """Pictures by URL, and what else a server may answer."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.is_over = threading.Event()
        super().__init__(tuple)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def reply(self, head: str, body: bytes) -> Iterable[bytes]:
        self.paths.append(path := head.split()[1])
        if path == "/slow.png":
            self.is_over.wait(10)
        status = {"/moved.png": "302 x\r\nlocation: /a.png", "/none.png": "404 x"}
        yield f"HTTP/1.0 {status.get(path, '200 x')}\r\n\r\n".encode()
        yield b"<html>" if path == "/page" else base64.b64decode(PNG)


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Elsewhere]:
    with closing(Elsewhere()) as server:
        yield server
        server.is_over.set()


@pytest.fixture(scope="module")
def fetching(
    engine: ScriptedEngine,
    elsewhere: Elsewhere,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TestClient]:
    port = elsewhere.port
    hosts = (f"127.0.0.1:{port}", f"Pictures.test:{port}")
    folder = tiny_vision(tmp_path_factory.mktemp("vision"))
    with wire.client(folder, engine, picture_hosts=hosts) as client:
        yield client


def test_pictures_of_hosts_that_the_owner_allows_are_fetched(
    fetching: TestClient, engine: ScriptedEngine, elsewhere: Elsewhere
) -> None:
    url = f"http://127.0.0.1:{elsewhere.port}/a.png"
    source = {"type": "image", "source": {"type": "url", "url": url}}
    bodies = {
        "/v1/chat/completions": chat(seen(url), seen(url)),
        "/v1/messages": chat(source),
        "/v1/responses": {
            "model": MODEL,
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
        },
    }
    for path, body in bodies.items():
        elsewhere.paths.clear()
        row, _ = ask(fetching, engine, path, body)
        assert {picture.digest for picture in row.pictures} == {DIGEST}
        assert elsewhere.paths == ["/a.png"]


NOT_FETCHED = {
    "http://127.0.0.1:{port}/moved.png": "answered 302",
    "http://127.0.0.1:{port}/none.png": "answered 404",
    "http://127.0.0.1:{port}/page": "no picture",
    "http://127.0.0.1:{port}/slow.png": "did not come within",
    "http://127.0.0.1/a.png": "server.picture_hosts",
    "http://localhost:{port}/a.png": "server.picture_hosts",
    "http://me@127.0.0.1:{port}/a.png": "server.picture_hosts",
    "http://127.1:{port}/a.png": "server.picture_hosts",
    "http://127.0.0.1:{port}@elsewhere.test/a.png": "server.picture_hosts",
    "http://elsewhere.test/#@127.0.0.1:{port}/a.png": "server.picture_hosts",
    "http://elsewhere.test\\@127.0.0.1:{port}/a.png": "server.picture_hosts",
    "http://pictures.test:{port}/a.png": "private network",
}


@pytest.mark.parametrize("url", NOT_FETCHED)
def test_a_picture_that_is_not_fetched_is_refused_in_a_question_only(
    fetching: TestClient,
    engine: ScriptedEngine,
    elsewhere: Elsewhere,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
) -> None:
    known = socket.getaddrinfo

    def resolved(host: Any, *rest: Any, **given: Any) -> Any:
        return known("127.0.0.1" if host == "pictures.test" else host, *rest, **given)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(limits, "PICTURE_URL_SECONDS", 0.1 if "slow" in url else 30)
    given, why = url.format(port=elsewhere.port), NOT_FETCHED[url]
    elsewhere.paths.clear()
    refused = fetching.post("/v1/chat/completions", json=chat(words("look"), seen(given)))
    assert refused.status_code == 400
    assert why in refused.json()["error"]["message"]
    assert "/a.png" not in elsewhere.paths
    history = {"role": "user", "content": [seen(given)]}, {"role": "assistant", "content": "Hm."}
    row, _ = ask(fetching, engine, "/v1/chat/completions", chat(seen(), before=history))
    assert len(row.pictures) == 1


def test_fetched_pictures_have_a_limit_together(
    fetching: TestClient, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching.app.state, "max_body_bytes", 1500)  # type: ignore[attr-defined]
    urls = (f"http://127.0.0.1:{elsewhere.port}/{number}.png" for number in range(9))
    refused = fetching.post("/v1/chat/completions", json=chat(*map(seen, urls)))
    assert "`server.max_body_bytes`" in refused.json()["error"]["message"]
