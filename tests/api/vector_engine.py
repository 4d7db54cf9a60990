"""An engine that computes a vector of two numbers for each text."""

import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from mlx_server.engine.client import RowStream
from mlx_server.engine.messages import Embed, Embedded
from tests.api.wire import ScriptedEngine


class VectorEngine(ScriptedEngine):
    """The numbers are 0 and the last token's id, in texts that are computed together."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded: list[Embed] = []

    @asynccontextmanager
    async def embed(self, rows: Sequence[Embed]) -> AsyncIterator[RowStream]:
        answers = RowStream()
        for row in rows:
            row.row = len(self.embedded)
            self.embedded.append(row)
            if not self.silent and not self.failure:
                vectors = [struct.pack("<2f", 0, ids[-1]) for ids in row.inputs]
                answers.put(Embedded(row.row, vectors))
        if self.failure:
            answers.fail(self.failure)
        with self.computing(row.row for row in rows):
            yield answers
