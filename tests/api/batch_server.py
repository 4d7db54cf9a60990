"""A server of batches alone, until it is killed: its endpoint answers at once or a moment later."""

import asyncio
import random
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from fastapi import FastAPI, Request, Response

from mlx_server.api import batch_runner
from mlx_server.api.batch_runner import BatchRunner
from mlx_server.api.handlers import json_response
from mlx_server.config.settings import STORE_FILE
from mlx_server.errors import ModelNotFound
from mlx_server.http.security import client_states
from mlx_server.store import Store

CHAT = "/v1/chat/completions"


async def answer(http: Request) -> Response:
    body = await http.json()
    await asyncio.sleep(random.random() * 0.02)
    if body["model"] == "no-such":
        raise ModelNotFound("There is no such model.")
    return json_response({"said": body["padding"] * "x"})


def serve(data: Path, told: Connection) -> None:
    async def run() -> None:
        batch_runner.LOOK_SECONDS = 0.002
        batch_runner.ENDPOINTS[CHAT] = answer
        store = await Store.open(data / STORE_FILE)
        runner = BatchRunner(FastAPI(), store, client_states([]), places=4)
        await runner.adopt()
        told.send("begun")
        await asyncio.Event().wait()

    sys.setswitchinterval(1e-5)
    asyncio.run(run())
