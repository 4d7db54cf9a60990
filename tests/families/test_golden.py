"""The families' golden outputs, through their parsers, in tokens and in text cut at any size."""

import asyncio
import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import msgspec
import pytest

from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import HEADER_BYTES, Ready, decode_commands
from mlx_server.errors import EngineDied, ServerError
from mlx_server.events import (
    Event,
    Finished,
    Repaired,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
)
from mlx_server.families import FAMILIES
from mlx_server.families.base import ModelFamily
from mlx_server.generation.generate import generate
from mlx_server.messages import Conversation, Message
from mlx_server.pool.pool import Pool
from mlx_server.pool.prepare import ModelSpec
from mlx_server.requests import GenerateRequest
from mlx_server.worker.engine import Engine
from tests.families.goldens import (
    Golden,
    Player,
    Reads,
    folded,
    goldens_of,
    outputs_of,
    shown,
    tools,
)
from tests.families.walks import vocabulary_of

CASES = [(family, case) for family in FAMILIES for case in goldens_of(family)]

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
every_case = pytest.mark.parametrize(
    ("family", "case"), CASES, ids=[f"{family.name}: {case.name}" for family, case in CASES]
)


@every_family
def test_every_family_has_golden_outputs(family: ModelFamily) -> None:
    names = [case.name for case in goldens_of(family)]
    assert names, f"{outputs_of(family)} is missing or empty"
    assert len(set(names)) == len(names), f"two cases of one name: {sorted(names)}"


@pytest.mark.slow
@every_case
def test_every_case_reads_the_same_however_it_is_cut(family: ModelFamily, case: Golden) -> None:
    wanted, player = shown(case.reads, case.reads), Player(family, case)
    # tokens of reasoning are counted by their place
    assert not case.reads.reasoning or "reasoning" in player.places()
    for way, events in player.ways():
        try:
            found = shown(folded(events), case.reads)
        except AssertionError as error:
            pytest.fail(f"{way}: {error}\n{case.output}")
        assert found == wanted, f"{way}:\n{case.output}"


SHOWN_IN_CODE = "a call that the answer shows in a block of code"
"""An answer that ends with such a call makes it, since some models put their calls into code."""


ENDS = 5
"""The most places at which one case ends; a family has some fourteen cases."""


@pytest.mark.slow
@every_family
def test_an_answer_that_ends_anywhere_shows_no_half_call_and_no_mark(family: ModelFamily) -> None:
    for case in goldens_of(family):
        shows_no_half_call_and_no_mark(family, case)


def shows_no_half_call_and_no_mark(family: ModelFamily, case: Golden) -> None:
    player = Player(family, case)
    whole = folded(player.by_tokens())
    unseen = {
        mark
        for mark in player.tokenizer.control_tokens.values()
        if mark not in whole.text + whole.reasoning
    }
    tokens = len(player.tokenizer.encode(case.output))
    step = 1 + tokens // ENDS
    for ended in range(1 + tokens % step, tokens, step):  # elsewhere in each case
        found = folded(player.ended_after(ended))
        made = [(call.name, call.arguments) for call in found.calls]
        if case.name != SHOWN_IN_CODE:
            wanted = [(call.name, call.arguments) for call in whole.calls[: len(made)]]
            assert made == wanted, f"{case.name}, ended after {ended}"
        seen = found.text + found.reasoning
        assert not [mark for mark in unseen if mark in seen], (case.name, ended, seen)


@pytest.mark.slow
@every_family
def test_a_stop_token_that_is_spelled_out_ends_any_answer(family: ModelFamily) -> None:
    for case in goldens_of(family):
        if case.cut or not case.by_text or Player(family, case).reads_token_ids:
            continue
        spelled = msgspec.structs.replace(
            case, output=case.output + "".join(family.stop_tokens[:1])
        )
        for size in (4, len(spelled.output)):
            found = shown(folded(Player(family, spelled).as_text(size)), case.reads)
            assert found == shown(case.reads, case.reads), f"{case.name}, cut at {size}"


TEXTS = ("path", "content", "query", "city")
"""Parameters of the golden tools that take any text."""


def pieces_of_long_texts(family: ModelFamily, case: Golden) -> list[tuple[int, int]]:
    """Of each whole call with a long text among its arguments: its length, and in how many pieces
    the arguments came."""
    arguments: dict[int, list[str]] = {}
    whole: set[int] = set()
    for event in Player(family, case).by_tokens():
        if isinstance(event, ToolCallDelta):
            arguments.setdefault(event.call, []).append(event.arguments)
        elif isinstance(event, ToolCallFinished):
            whole.add(event.call)
    found = [
        (json.loads("".join(pieces)), len(pieces)) for pieces in (arguments[call] for call in whole)
    ]
    lengths = [(max((len(made.get(k, "")) for k in TEXTS), default=0), n) for made, n in found]
    return [(length, pieces) for length, pieces in lengths if length >= 10]


@pytest.mark.slow
@every_family
def test_text_among_the_arguments_comes_as_it_is_written(family: ModelFamily) -> None:
    for case in goldens_of(family):
        for length, pieces in pieces_of_long_texts(family, case):
            assert pieces >= length / 6, case.name


class Within(EngineClient):
    """The real engine, in this process and without a pipe."""

    def __init__(self, *, concurrency: int, cache_bytes: int = 0) -> None:
        super().__init__()
        self._engine = Engine(concurrency=concurrency)
        self._wanted = asyncio.Event()

    @property
    def alive(self) -> bool:
        return True

    async def start(self) -> Ready:
        self._reading = asyncio.create_task(self._step())
        # or those who wait for it would wait for ever
        self._reading.add_done_callback(lambda _: self._die(EngineDied("It is over.")))
        return Ready(0, gpu=False, recommended_bytes=None)

    async def stop(self, error: ServerError | None = None) -> None:
        assert self._reading
        self._reading.cancel()

    def _write(self, frame: bytes) -> None:
        for command in decode_commands(frame[HEADER_BYTES:]):
            for report in self._engine.handle(command):
                self._dispatch(report)
        self._wanted.set()

    async def _step(self) -> None:
        while await self._wanted.wait():
            while self._engine.pause is not None:
                for report in self._engine.step():
                    self._dispatch(report)
                await asyncio.sleep(0)
            self._wanted.clear()


BATCH = 8


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES[::8], ids=lambda family: family.name)
def test_a_batch_of_replayed_cases_reads_as_each_alone(
    family: ModelFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the whole of the server below its endpoints."""
    monkeypatch.setenv("MLX_SERVER_CACHE", str(tmp_path))
    cases = [case for case in goldens_of(family) if case.output]
    transcript = tmp_path / "said.jsonl"
    transcript.write_text("\n".join(_entry(case) for case in cases), "utf-8")
    spec = ModelSpec("m", f"replay:{transcript}", family=family.name)

    logprobs = None if family.name == "gpt_oss" else 0  # its vocabulary makes them slow

    async def answered() -> list[list[Event]]:
        pool = Pool([spec])
        pool.make_engine = lambda **limits: Within(concurrency=BATCH)
        await pool.start()
        try:
            starts = range(0, len(cases), BATCH)
            return [
                e for at in starts for e in await _answers(pool, cases[at : at + BATCH], logprobs)
            ]
        finally:
            await pool.stop()

    for case, events in zip(cases, asyncio.run(asyncio.wait_for(answered(), 60)), strict=True):
        *deltas, end = events
        assert isinstance(end, Finished)
        promoted = Repaired(end.index, "reasoning", "content")
        is_promoted = "reasoning content" not in case.reads.repairs
        if is_promoted and promoted in deltas:  # reasoning that became the text too
            deltas = [e for e in deltas if not isinstance(e, TextDelta) and e != promoted]
        # no grammar holds them, so what is not complete is not reported
        whole = msgspec.structs.replace(case.reads, unfinished=[], unmet=_of_finished(case.reads))
        assert shown(folded(deltas), whole) == shown(whole, whole), case.name
        otherwise = "tool_calls" if case.reads.calls else "stop"
        assert end.reason == ("length" if case.cut else otherwise), case.name
        if logprobs is not None:
            assert _logprobs_spell_the_text(family, deltas), case.name


def _logprobs_spell_the_text(family: ModelFamily, events: Sequence[Event]) -> bool:
    """Whether each token of the text has one log probability, in order. Control tokens that the
    text lacks may have some too."""
    texts = [event for event in events if isinstance(event, TextDelta)]
    entries = [entry for delta in texts for entry in delta.logprobs]
    control = vocabulary_of(family)[0].control_tokens
    # only a line break between texts is not always the model's
    written = "".join(f"{_optional(d.separator)}{re.escape(d.text)}" for d in texts)
    kinds = (entries, [entry for entry in entries if entry.id not in control])
    return any(
        re.fullmatch(written, b"".join(e.bytes for e in kind).decode(errors="replace"))
        for kind in kinds
    )


def _optional(separator: str) -> str:
    return "\n?" if separator == "\n" else re.escape(separator)


def _of_finished(reads: Reads) -> list[str]:
    return [what for what in reads.unmet if not what.endswith("is text")]


def _entry(case: Golden) -> str:
    finish = "length" if case.cut else "stop"
    said = {"output": case.output, "generation_prompt": case.prompt_end, "finish": finish}
    return json.dumps({"match": case.name, **said})


async def _answers(pool: Pool, cases: Sequence[Golden], logprobs: int | None) -> list[list[Event]]:
    asked = (Conversation((Message("user", case.name),), tools()) for case in cases)
    events = [
        e async for e in generate(GenerateRequest("m", tuple(asked), logprobs=logprobs), pool)
    ]
    of_answers = sorted(
        (event for event in events if not isinstance(event, Started)), key=lambda e: e.index
    )
    return [list(own) for _, own in groupby(of_answers, key=lambda event: event.index)]
