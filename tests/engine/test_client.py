"""The server's end and a real engine process at the other."""

import asyncio
import gc
import os
import random
import signal
import socket
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import pytest

from mlx_server import limits
from mlx_server.engine import messages
from mlx_server.engine.client import EngineClient
from mlx_server.engine.messages import (
    Admitted,
    CommandFailed,
    ComputeAhead,
    Generate,
    LimitCache,
    LoadModel,
    ModelLoading,
    PromptLogprobs,
    Report,
    RowFailed,
    StepOutput,
    Unloaded,
)
from mlx_server.errors import EngineDied, GenerationFailed, InvalidGrammar, Overloaded
from mlx_server.requests import SamplingParams
from tests.engine.clients import (
    ENDLESS,
    HANG,
    answered,
    ask,
    asynchronous,
    first_token,
    freeze,
    ignored,
    running,
    until_it_fails,
)
from tests.event_loops import NewLoop, on_each_loop, run_on
from tests.tiny import IM_END, tiny_llama
from tests.worker.batch_runs import Ask, alone, ids

pytestmark = pytest.mark.slow


@asynchronous
async def test_a_model_is_loaded_and_several_requests_share_it(
    tiny_path: Path, tiny_model: Any
) -> None:
    progress: list[tuple[int, int]] = []
    async with running() as engine:
        loaded = await engine.load(
            LoadModel("tiny", str(tiny_path)), lambda *bytes: progress.append(bytes)
        )
        assert (loaded.model, loaded.vocabulary) == ("tiny", 320)
        assert progress[-1][0] == progress[-1][1] > 400_000
        requests = [[ask(9), ask(3, prompt=8)], [ask(20)], [ask(4, prompt=40)]]
        answers = await asyncio.gather(*(answered(engine, *rows) for rows in requests))
        for rows, answer in zip(requests, answers, strict=True):
            expected = [alone(tiny_model, Ask(row.prompt, row.max_tokens)) for row in rows]
            assert [ids(tokens) for tokens in answer] == [ids(tokens) for tokens in expected]
        assert len({row.row for rows in requests for row in rows}) == 4
        assert not engine.row_streams


@asynchronous
async def test_leaving_at_any_moment_leaves_nothing_behind(tiny_path: Path) -> None:
    """Cancels cross the last tokens of rows that end at the same time."""
    dice = random.Random(0)
    async with running(tiny_path) as engine:
        for _ in range(60):
            rows = [ask(dice.randint(1, 4), prompt_logprobs=dice.random() < 0.3) for _ in range(3)]
            wanted, items = dice.randrange(12), 0
            async with engine.generate(rows) as feed:
                while items < wanted and engine.row_streams:
                    items += len(await feed.take())
        assert not engine.row_streams
        steps: list[StepOutput] = []
        engine.on_step = steps.append
        assert len((await answered(engine, ask(6)))[0]) == 6
        assert steps[-1].waiting == 0


@asynchronous
async def test_an_answer_pauses_when_too_much_of_it_is_unread(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tiny_path) as engine:
        async with engine.generate([ask(20)]) as feed:
            await answered(engine, ask(60))
        monkeypatch.setattr(limits, "UNREAD_BYTES", feed.unread)
        async with engine.generate([ask(20)]) as again:
            await answered(engine, ask(60))
        assert not again.is_paused
        async with engine.generate([ask(ENDLESS)]) as endless:
            while not endless.is_paused:
                assert endless.unread <= feed.unread
                await asyncio.sleep(0)
            await answered(engine, ask(1))  # the engine has paused it, and what it sent is here
            kept = endless.unread
            assert len((await answered(engine, ask(40)))[0]) == 40  # 40 steps go on without it
            assert endless.unread == kept > feed.unread


@asynchronous
async def test_a_row_that_fails_fails_its_request_alone(tiny_path: Path) -> None:
    async with running(tiny_path) as engine:
        bystander = asyncio.create_task(answered(engine, ask(40)))
        with pytest.raises(GenerationFailed, match="absent"):
            await until_it_fails(engine, ask(ENDLESS), ask(model="absent"))
        assert len((await bystander)[0]) == 40
        assert engine.alive
        assert not engine.row_streams


@asynchronous
async def test_a_grammar_that_can_t_be_used_fails_its_request_alone(tiny_path: Path) -> None:
    async with running() as engine:
        await engine.load(LoadModel("tiny", str(tiny_path), stop_tokens=[IM_END]), ignored)
        good = ask(30, grammar="start: /[a-z]+/\n")
        reported, refused = await asyncio.gather(
            answered(engine, good),
            answered(engine, ask(grammar="start: foo\n")),
            return_exceptions=True,
        )
        assert isinstance(refused, InvalidGrammar)
        assert refused.code == "invalid_json_schema"
        assert "foo" in refused.message
        assert not isinstance(reported, BaseException)
        assert len(reported[0]) == 30
        # idle by now, it sleeps until the grammar is there, and learns of that without a command
        (alone,) = await answered(engine, ask(3, grammar="start: /[0-9]+/\n"))
        assert len(alone) == 3


@asynchronous
async def test_a_row_that_is_turned_away_may_be_sent_again(tiny_path: Path) -> None:
    async with running(tiny_path) as engine:
        failing = asyncio.create_task(until_it_fails(engine, ask(ENDLESS)))
        await asyncio.sleep(0)
        (row,) = engine.row_streams
        engine._dispatch(RowFailed(row, "other slow grammars are being compiled.", "Overloaded"))
        with pytest.raises(Overloaded, match="other slow grammars") as turned_away:
            await failing
        assert turned_away.value.status == 503
        assert "Retry-After" in turned_away.value.headers
        assert len((await answered(engine, ask(4)))[0]) == 4


@pytest.mark.alone
@asynchronous
async def test_an_unloaded_model_gives_its_memory_back_to_the_system(
    tiny_path: Path, tmp_path: Path
) -> None:
    """As seen from the outside, with another model at work."""
    large = tiny_llama(tmp_path / "large", hidden=1024, layers=3, vocabulary=4000)
    size = (large / "model.safetensors").stat().st_size
    assert size > 100_000_000
    async with running(tiny_path) as engine, engine.generate([ask(ENDLESS)]) as feed:
        await first_token(feed)
        process = psutil.Process(engine.pid)
        for _ in range(2):
            before = process.memory_info().rss
            await engine.load(LoadModel("large", str(large)), ignored)
            await answered(engine, ask(model="large", prompt=100))
            loaded = process.memory_info().rss
            await engine.unload("large")
            assert loaded - before > 0.9 * size
            assert loaded - process.memory_info().rss > 0.9 * size
        await first_token(feed)


@pytest.mark.parametrize(
    "late",
    [
        ModelLoading("tiny", 1, 2),
        CommandFailed("LoadModel", "tiny", ""),
        Unloaded("tiny"),
        Admitted(0),
    ],
)
@asynchronous
async def test_what_still_comes_from_a_lost_engine_is_dropped(
    tiny_path: Path, late: Report, caplog: pytest.LogCaptureFixture
) -> None:
    engine = EngineClient()
    frames = asyncio.StreamReader()
    reading = asyncio.create_task(engine._read_reports(frames))
    await engine.stop()
    frames.feed_data(messages.frame(messages.encode_reports([late])))
    frames.feed_data(messages.frame(messages.encode_reports([late])))
    frames.feed_eof()
    await reading
    assert not caplog.records


@on_each_loop
def test_a_command_to_a_process_that_has_just_died_says_so(new_loop: NewLoop) -> None:
    """A write that fails closes the socket before reading from it has noticed anything."""
    run_on(new_loop, _commands_after_a_death(), HANG)


async def _commands_after_a_death() -> None:
    engine = EngineClient()
    engine._serves = True
    ours, theirs = socket.socketpair()
    reader, engine._writer = await asyncio.open_connection(sock=ours)
    reading = asyncio.create_task(engine._read_reports(reader))
    theirs.close()
    while not engine.lost.is_set():
        try:
            engine.send(LimitCache(0))
        except EngineDied:
            assert not engine.alive
        await asyncio.sleep(0)
    with pytest.raises(EngineDied):
        engine.send(LimitCache(0))
    await reading


BROKEN = Generate(0, "tiny", [1], 5, [], SamplingParams(top_k=cast(int, 1.5)))


@pytest.mark.parametrize(
    ("row", "error"),
    [(ask(2**70), OverflowError), (BROKEN, msgspec.ValidationError)],
    ids=["no message", "not to be read"],
)
@asynchronous
async def test_a_request_that_the_engine_could_not_read_is_not_sent(
    tiny_path: Path, row: Generate, error: type[Exception]
) -> None:
    async with running(tiny_path) as engine:
        with pytest.raises(error):
            await until_it_fails(engine, ask(ENDLESS), row)
        assert not engine.row_streams
        await answered(engine, ask(1))  # after the command that cancels the row that was sent
        steps: list[StepOutput] = []
        engine.on_step = steps.append
        (tokens,) = await answered(engine, ask(3))
        assert {token.row for step in steps for token in step.tokens} == {tokens[0].row}


@asynchronous
async def test_messages_of_megabytes_pass_both_ways(tiny_path: Path) -> None:
    async with running(tiny_path) as engine:
        huge = ask()
        huge.prompt = [10**6] * 10**6  # and no such token, so that nothing is computed
        with pytest.raises(GenerationFailed, match="1000000"):
            await until_it_fails(engine, huge)
        everything = SamplingParams(temperature=0, logprobs=320)
        rows = [ask(0, prompt=700, sampling=everything, prompt_logprobs=True) for _ in range(2)]
        async with engine.generate(rows) as feed:
            tops: list[int] = []
            while len(tops) < len(rows) * 699:
                pieces = [item for item in await feed.take() if isinstance(item, PromptLogprobs)]
                tops += [len(entry.top) for piece in pieces for entry in piece.logprobs]
        assert set(tops) == {320}
        engine.send(ComputeAhead("tiny", [5] * 10**6, most=100))


@asynchronous
async def test_killed_the_engine_fails_everyone_who_waits(tiny_path: Path) -> None:
    async with running(tiny_path) as engine:
        pid = freeze(engine)
        waiting = [
            asyncio.create_task(until_it_fails(engine, ask(ENDLESS), ask(ENDLESS))),
            asyncio.create_task(until_it_fails(engine, ask(ENDLESS))),
            asyncio.create_task(engine.load(LoadModel("second", str(tiny_path)), ignored)),
        ]
        await asyncio.sleep(0)  # they have asked
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(HANG):
            found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in found] == [EngineDied] * 3
        assert not engine.alive
        assert not engine.row_streams

        with pytest.raises(EngineDied):
            await engine.load(LoadModel("tiny", str(tiny_path)), ignored)
        with pytest.raises(EngineDied):
            async with engine.generate([ask()]):
                pytest.fail("there is nobody to ask")
        assert not engine.row_streams


@asynchronous
async def test_refusing_for_ever_keeps_nothing_of_the_refused() -> None:
    """The traceback of an error that all share would gather the frames of every request."""
    async with running() as engine:
        os.kill(freeze(engine), signal.SIGKILL)
        with pytest.raises(EngineDied):
            await until_it_fails(engine, ask())
        depths = set()
        for _ in range(4):
            with pytest.raises(EngineDied) as caught:
                await until_it_fails(engine, ask())
            depths.add(len(caught.traceback))
        assert len(depths) == 1


@pytest.mark.parametrize("listener", ["on_step", "progress"])
@asynchronous
async def test_nobody_waits_for_reports_that_can_not_be_taken(
    tiny_path: Path, listener: str
) -> None:
    """Whatever goes wrong while reading: without a reader no answer would ever end."""

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    async with running(tiny_path) as engine:
        request = asyncio.create_task(answered(engine, ask(ENDLESS)))
        if listener == "on_step":
            engine.on_step = fails
        else:
            with pytest.raises(EngineDied):
                await engine.load(LoadModel("second", str(tiny_path)), fails)
        with pytest.raises(EngineDied):
            await request
        assert not engine.alive


@asynchronous
async def test_whoever_unloads_a_model_hears_when_it_is_gone(tiny_path: Path) -> None:
    async with running(tiny_path) as engine:
        request = asyncio.create_task(until_it_fails(engine, ask(ENDLESS)))
        await asyncio.sleep(0)  # it has asked
        await asyncio.gather(*(engine.unload("tiny") for _ in range(3)))
        with pytest.raises(GenerationFailed, match="unloaded"):
            await request
        await engine.unload("tiny")
        with pytest.raises(GenerationFailed, match="tiny"):
            await until_it_fails(engine, ask())
        await engine.load(LoadModel("tiny", str(tiny_path)), ignored)
        assert len((await answered(engine, ask()))[0]) == 5


@asynchronous
async def test_a_start_that_is_cancelled_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        engine = EngineClient(successor=ours)
        starting = asyncio.create_task(engine.start())
        for _ in range(100):  # it connects, and waits for a report
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await engine.stop()
    del engine, starting
    gc.collect()
    assert "never retrieved" not in caplog.text
