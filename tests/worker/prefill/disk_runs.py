"""Engines whose prompts outlive them on a disk."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from mlx_server.engine.messages import DiskCacheUse, LimitCache, LoadAdapter
from mlx_server.prompt_files import PromptFolder
from tests.worker.bench import Bench

BLOCK = 64
MOST = 1 << 30


class Process(Bench):
    """An engine with a folder, as after a start of the server."""

    def __init__(
        self,
        path: Path,
        folder: Path | None,
        most_bytes: int = MOST,
        adapter: Path | None = None,
        kv_bits: int | None = None,
        cache_bytes: int = 1 << 30,
    ) -> None:
        self.folder = PromptFolder(folder, most_bytes, BLOCK) if folder else None
        if self.folder:
            self.folder.open()
        super().__init__(path, cache_bytes, disk=self.folder, kv_bits=kv_bits)
        if adapter:
            self.handle(LoadAdapter("m", "digest", str(adapter)))

    def write(self) -> None:
        """Waits until all is in files, and is reported."""
        self.engine.prompts.disk.flush(seconds=30)
        self.step()

    def forget_memory(self) -> None:
        """Only the files are left."""
        self.handle(LimitCache(0))
        self.handle(LimitCache(1 << 30))

    def begin(self, prompt: Sequence[int], tokens: int = 8, **fields: Any) -> int:
        return super().begin(prompt, tokens, **fields)

    def answer(self, prompt: Sequence[int], tokens: int = 8, **fields: Any) -> list[int]:
        return super().answer(prompt, tokens, **fields)

    @property
    def known(self) -> int:
        """How many tokens of the last prompt were known."""
        return self.cached[self.rows]

    def total(self, name: str) -> int:
        uses = [report for report in self.reports if isinstance(report, DiskCacheUse)]
        return sum(getattr(use, name) for use in uses)

    def answer_without_writing(self, prompt: list[int], **fields: Any) -> None:
        """Answers with one token, and leaves the writing to later steps."""
        row = self.begin(prompt, 1, **fields)
        while row not in self.step():
            pass

    def is_reading(self, row: int) -> bool:
        return self.engine.prompts.disk.restorer.is_reading(row)

    def stop(self) -> None:
        self.engine.stop()


def words(seed: int, count: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(256) for _ in range(count)]


Start = Callable[..., Process]
