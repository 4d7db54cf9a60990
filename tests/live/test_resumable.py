"""Clients that lose their connection in the middle of a stream, and go on."""

from typing import Any

from openai import OpenAI, Stream
from openai.types.chat import ChatCompletionChunk

from tests.live.server import SHALLOW, LiveServer

WANTED = {"x-mlx-server-resumable": "true"}
ASKED: dict[str, Any] = {
    "model": SHALLOW,
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": 200,
    "temperature": 0,
    "stream": True,
}


def texts(chunks: list[ChatCompletionChunk]) -> list[str | None]:
    return [choice.delta.content for chunk in chunks for choice in chunk.choices]


def test_a_chat_goes_on_after_the_last_chunk(server: LiveServer, client: OpenAI) -> None:
    expected = [*client.chat.completions.create(**ASKED)]
    raw = client.chat.completions.with_raw_response.create(**ASKED, extra_headers=WANTED)
    id, stream = raw.headers["x-mlx-server-stream"], raw.parse()
    seen = [next(stream) for _ in range(3)]
    stream.close()
    for _ in range(2):  # the second connection is lost too
        with client.get(
            f"/chat/completions/{id}/stream",
            cast_to=ChatCompletionChunk,
            options={"params": {"after": len(seen)}},
            stream=True,
            stream_cls=Stream[ChatCompletionChunk],
        ) as rest:
            seen += [next(rest) for _ in range(3)]
    with client.get(
        f"/chat/completions/{id}/stream",
        cast_to=ChatCompletionChunk,
        options={"params": {"after": len(seen)}},
        stream=True,
        stream_cls=Stream[ChatCompletionChunk],
    ) as rest:
        seen += rest
    assert texts(seen) == texts(expected)


def test_a_message_goes_on_by_the_number_of_its_last_event(server: LiveServer) -> None:
    body = {**ASKED, "max_tokens": 100}
    with server.http() as http:
        with http.stream("POST", "/v1/messages", json=body, headers=WANTED) as begun:
            path = f"/v1/messages/{begun.headers['x-mlx-server-stream']}/stream"
            lines = begun.iter_lines()
            seen = [next(lines) for _ in range(20)]
        last = max(int(line[4:]) for line in seen if line.startswith("id: "))
        # of an event that was cut there is all again
        kept = "\n".join(seen).partition(f"id: {last}\n")[0]
        rest = http.get(path, headers={"last-event-id": str(last - 1)}).text
        assert http.get(path).text == kept + rest
    assert rest.startswith(f"id: {last}\n")
    assert "message_stop" in rest
