"""Measures what reading an answer costs the server: a text of 300 tokens, with tools on offer."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench_parts.tables import Row
from mlx_server.families import family_named
from mlx_server.messages import Tool
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.parsers.parse_context import ParseContext
from mlx_server.requests import RepairPolicy
from mlx_server.sources.replay_checkpoint import replay_checkpoint

COLUMNS = ("family", "without repairs, ms", "with repairs, ms", "difference, ms")
FAMILIES = ("gpt_oss", "qwen3", "llama3", "gemma4", "glm4_5", "mistral")
TOOLS = tuple(map(Tool, ("search", "read_file", "write_file", "get_time", "run", "add", "tag")))

TEXT = Path(__file__).parents[2] / "README.md"
TOKENS, ANSWERS = 300, 400
BEGINS = {"gpt_oss": "<|channel|>final<|message|>"}


@dataclass(frozen=True)
class Reading:
    family: str
    without: float
    """Processor time of an answer in seconds, the parser's making included."""
    repairing: float


def readings() -> Iterator[Reading]:
    """Yields the least times: they depend least on what else the machine does."""
    prose = " ".join(line for line in TEXT.read_text("utf-8").split("\n") if line[:1].isalpha())
    with TemporaryDirectory() as folder:
        checkpoint = replay_checkpoint(Path(folder), family_named("gpt_oss"))
        tokenizer = Tokenizer(checkpoint / "tokenizer.json")
    for family in FAMILIES:
        begun = tokenizer.encode(BEGINS.get(family, ""))
        ids = [*begun, *tokenizer.encode(prose)[:TOKENS]]
        detokenizer = tokenizer.detokenizer()
        tokens = [(token, detokenizer.feed(token)) for token in ids]
        yield Reading(family, *map(min, _times(family, tokens)))


def _times(family: str, tokens: list[tuple[int, str]]) -> tuple[list[float], list[float]]:
    policies = RepairPolicy(mistakes=False), RepairPolicy()
    taken: tuple[list[float], list[float]] = [], []
    for _ in range(ANSWERS):
        for times, policy in zip(taken, policies, strict=True):
            began = time.thread_time()
            parser = family_named(family).make_parser(ParseContext(tools=TOOLS, repair=policy))
            for token, text in tokens:
                parser.feed(token, text)
            parser.finish(cut=False)
            times.append(time.thread_time() - began)
    return taken


def rows(found: list[Reading]) -> Iterator[Row]:
    for each in found:
        times = each.without, each.repairing, each.repairing - each.without
        yield each.family, *(f"{1000 * seconds:.3f}" for seconds in times)
