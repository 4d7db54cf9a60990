"""An answer that is rejected has another row, with the error in its prompt."""

import asyncio
from dataclasses import replace

from mlx_server.checkpoints.tokenizer import Tokenizer
from mlx_server.engine.messages import Generate
from mlx_server.events import Event, Repaired
from mlx_server.generation.generate import RetryingAnswer
from mlx_server.generation.plan import plan
from mlx_server.messages import Conversation, Message
from mlx_server.pool.prepare import ModelSpec, prepare
from mlx_server.requests import GenerateRequest, JsonFormat
from tests.generation.scripted import END, finished, said, text_of

REQUEST = GenerateRequest(
    "m",
    (Conversation((Message("user", "Numbers?"),)),),
    format=JsonFormat({"type": "array", "uniqueItems": True}, strict=False),
    buffered=True,
)


def test_a_rejected_answer_has_another_row(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    roomy = replace(spec, context_length=1000)
    prepared = prepare(roomy, lambda *_: None, upcast=True)
    planned = plan(prepared, REQUEST)
    assert planned.unchecked
    answer = RetryingAnswer(prepared, 0, planned.rows[0], REQUEST, unchecked=True)

    async def fed(text: str) -> list[Event]:
        items = [*said(tokenizer.encode(text)), *said(END, finish="stop")]
        return [event for item in items for event in await answer.feed(item)]

    async def both() -> tuple[list[Event], Generate | None, list[Event]]:
        return await fed("[3, 3]"), answer.next_row(), await fed("[3]")

    first, row, second = asyncio.run(both())
    assert first == []
    assert row
    prompt = tokenizer.decode(row.prompt)
    assert "Numbers?" in prompt
    assert "non-unique" in prompt
    assert row.grammar == planned.rows[0].grammar
    assert text_of(second) == "[3]"
    assert Repaired(0, "schema", "content") in second
    tokens = sum(len(tokenizer.encode(text)) + 1 for text in ("[3, 3]", "[3]"))
    assert [end.completion_tokens for end in finished(second)] == [tokens]
    assert answer.finished
    assert answer.next_row() is None
