"""Exchanges run the same in a thread and on an event loop."""

import asyncio

from mlx_server.clients.emulation import checked_answer
from mlx_server.clients.exchange import Wire, arun
from tests.clients.asked import ASKED, content
from tests.clients.recorded import completion


def test_an_exchange_runs_the_same_where_it_is_awaited() -> None:
    answers = [completion(None), completion("Five.")]

    async def send(body: Wire) -> Wire:
        return answers.pop(0)

    answer = asyncio.run(arun(checked_answer({"messages": ASKED}, "gpt_oss"), send))
    assert content(answer) == "Five."
