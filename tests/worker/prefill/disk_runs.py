"""Engines whose prompts outlive them on a disk."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from mlx_server.engine.messages import (
    DiskCacheUse,
    Generate,
    LimitCache,
    LoadAdapter,
    LoadModel,
    ModelLoaded,
    Prefilled,
    Report,
    StepOutput,
)
from mlx_server.prompt_files import PromptFolder
from mlx_server.worker.engine import Engine
from tests.worker.kinds import KINDS, SIZES, Kind
from tests.worker.test_kinds import GREEDY

QWEN3_5 = Kind(
    "qwen3_5",
    {
        "model_type": "qwen3_5",
        "text_config": {
            **SIZES,
            "model_type": "qwen3_5_text",
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 2,
            "partial_rotary_factor": 0.5,
        },
    },
)
NAMES = ("llama", "gpt-oss", "gemma3", "mamba2", "lfm2")
ON_DISK = [*(kind for kind in KINDS if kind.name in NAMES), QWEN3_5]

BLOCK = 64
MOST = 1 << 30


class Process:
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
        self.engine = Engine(cache_bytes=cache_bytes, disk=self.folder)
        self.reports: list[Report] = []
        self.rows = 0
        self.path, self.kv_bits = path, kv_bits
        self.load()
        if adapter:
            self.engine.handle(LoadAdapter("m", "digest", str(adapter)))

    def load(self) -> None:
        self.engine.handle(LoadModel("m", str(self.path), kv_bits=self.kv_bits))
        self.settle()
        assert any(isinstance(report, ModelLoaded) for report in self.reports)

    def settle(self) -> None:
        """Steps until nothing is left to do, and all is written."""
        while self.engine.pause is not None:
            self.reports += self.engine.step()

    def write(self) -> None:
        """Waits until all is in files, and is reported."""
        self.engine.prompts.disk.flush(seconds=30)
        self.reports += self.engine.step()

    def forget_memory(self) -> None:
        """Only the files are left."""
        self.engine.handle(LimitCache(0))
        self.engine.handle(LimitCache(1 << 30))

    def begin(self, prompt: list[int], tokens: int = 8, **fields: Any) -> int:
        self.rows += 1
        fields = {"continued_from": len(prompt) - 1, **fields}  # the last token opens the answer
        request = Generate(self.rows, "m", prompt, tokens, [], GREEDY, **fields)
        self.reports += self.engine.handle(request)
        return self.rows

    def answer(self, prompt: list[int], tokens: int = 8, **fields: Any) -> list[int]:
        self.begin(prompt, tokens, **fields)
        self.settle()
        outputs = [report for report in self.reports if isinstance(report, StepOutput)]
        return [t.id for each in outputs for t in each.tokens if t.row == self.rows]

    @property
    def cached(self) -> int:
        """How many tokens of the last prompt were known."""
        prefilled = [report for report in self.reports if isinstance(report, Prefilled)]
        assert prefilled[-1].row == self.rows
        return prefilled[-1].cached_tokens

    def total(self, name: str) -> int:
        uses = [report for report in self.reports if isinstance(report, DiskCacheUse)]
        return sum(getattr(use, name) for use in uses)

    def answer_without_writing(self, prompt: list[int], **fields: Any) -> None:
        """Answers with one token, and leaves the writing to later steps."""
        row = self.begin(prompt, 1, **fields)
        while not any(
            token.row == row and token.finish
            for report in self.reports
            if isinstance(report, StepOutput)
            for token in report.tokens
        ):
            self.reports += self.engine.step()

    def is_reading(self, row: int) -> bool:
        return self.engine.prompts.disk.is_reading(row)

    def stop(self) -> None:
        self.engine.stop()


def words(seed: int, count: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(256) for _ in range(count)]


Start = Callable[..., Process]
