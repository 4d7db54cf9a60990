"""A question, and the text of its answer."""

from typing import Any

from mlx_server.clients.exchange import Wire

ASKED = [{"role": "user", "content": "How old is he?"}]


def content(answer: Wire) -> Any:
    return answer["choices"][0]["message"]["content"]
