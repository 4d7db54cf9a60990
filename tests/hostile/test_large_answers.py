"""However many values an answer has, the event loop goes on while it is made and sent."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from mlx_server import limits
from mlx_server.config.settings import ModelSettings, ServerSettings, Settings, StoreSettings
from mlx_server.engine.client import RowStream
from mlx_server.engine.messages import (
    Admitted,
    Embed,
    Embedded,
    Generate,
    Logprobs,
    PromptLogprobs,
    Token,
)
from mlx_server.generation.embeddings import SENT_TOKENS
from tests.api.wire import ScriptedEngine
from tests.hostile.test_loop import CHAT, RESPONSES, Body, Watch, posted, running
from tests.live.server import PLAIN
from tests.tiny import IM_END, tiny_embedder

pytestmark = pytest.mark.alone

EMBEDDINGS = "/v1/embeddings"
HI = [{"role": "user", "content": "hi"}]
TOKENS, TOP = 3_000, 20
INPUTS, WIDTH = 300, 4096
VECTOR = bytes(range(1, 65)) * (4 * WIDTH // 64)
SCORES = Logprobs(-0.5, [(id, -0.5 - id / 64) for id in range(TOP)])


class LargeEngine(ScriptedEngine):
    """Answers each row with many log probabilities, and each text with a wide vector."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []
        """The token ids that came together."""
        self.tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def generate(self, rows: Sequence[Generate]) -> AsyncIterator[RowStream]:
        answers = RowStream()
        for row in rows:
            row.row = len(self.taken)
            self.taken.append(row)
        answering = asyncio.create_task(self._answer(rows, answers))
        with self.computing(row.row for row in rows):
            yield answers
        await answering

    async def _answer(self, rows: Sequence[Generate], answers: RowStream) -> None:
        for row in rows:
            answers.put(Admitted(row.row))
            if row.prompt_logprobs:
                answers.put(PromptLogprobs(row.row, [SCORES] * (len(row.prompt) - 1)))
            for at in range(TOKENS):
                if not at % 100:
                    await asyncio.sleep(0)
                answers.put(Token(row.row, 70 + at % 20, None, SCORES))
            answers.put(Token(row.row, IM_END, "stop", SCORES))

    @asynccontextmanager
    async def embed(self, rows: Sequence[Embed]) -> AsyncIterator[RowStream]:
        answers = RowStream()
        self.sent.append(sum(len(text) for row in rows for text in row.inputs))
        for number, row in enumerate(rows, start=len(self.taken)):
            row.row = number
            answers.put(Embedded(number, [VECTOR] * len(row.inputs)))
        self.taken += [None] * len(rows)  # type: ignore[list-item]
        yield answers


@pytest.fixture(scope="module")
def engine() -> LargeEngine:
    return LargeEngine()


@pytest.fixture(scope="module")
def url(
    watch: Watch, engine: LargeEngine, tmp_path_factory: pytest.TempPathFactory, tiny_path: Path
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("large")
    settings = Settings(
        server=ServerSettings(port=0, drain_seconds=0),
        models={
            "tiny": ModelSettings(source=str(tiny_path)),
            "vectors": ModelSettings(source=str(tiny_embedder(folder / "vectors"))),
        },
        store=StoreSettings(data_dir=folder / "data"),
    )
    with running(settings, watch, engine) as url:
        yield url


SCORED: Body = {"messages": HI, "logprobs": True, "top_logprobs": TOP}
IDS = [[5 + at % 50] * 30 for at in range(INPUTS)]
ASKED: dict[str, tuple[str, Body]] = {
    "log probabilities": (CHAT, SCORED),
    "log probabilities that are stored": (CHAT, {**SCORED, "store": True}),
    "log probabilities of a completion": ("/v1/completions", {"prompt": "hi", "logprobs": TOP}),
    "log probabilities of a response": (
        RESPONSES,
        {"input": "hi", "top_logprobs": TOP, "include": ["message.output_text.logprobs"]},
    ),
    "log probabilities for Ollama's client": (
        "/api/chat",
        {"messages": HI, "logprobs": True, "top_logprobs": TOP, "stream": False},
    ),
    "vectors": (EMBEDDINGS, {"input": IDS}),
    "vectors as base64": (EMBEDDINGS, {"input": IDS, "encoding_format": "base64"}),
    "vectors for Ollama's client": ("/api/embed", {"input": ["hi"] * INPUTS}),
}


@pytest.mark.parametrize("name", ASKED)
def test_the_loop_goes_on_while_an_answer_is_made(watch: Watch, url: str, name: str) -> None:
    path, asked = ASKED[name]
    model = "vectors" if "vectors" in name else "tiny"
    response = posted(watch, url, path, {"model": model, **asked})
    assert response.status_code == 200, response.text[:300]
    assert response.json()


def test_the_engine_gets_many_texts_bit_by_bit(engine: LargeEngine, url: str) -> None:
    engine.sent.clear()
    texts = [[5] * 400] * (3 * SENT_TOKENS // 400)
    body = {"model": "vectors", "input": texts, "dimensions": None}
    response = httpx.post(url + EMBEDDINGS, json=body, **PLAIN, timeout=120)
    assert response.status_code == 200, response.text[:300]
    assert sum(engine.sent) == len(texts) * 400 <= limits.EMBEDDED_TOKENS
    assert max(engine.sent) <= SENT_TOKENS
