"""The server's end and a real engine process at the other."""

import asyncio
import functools
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, ParamSpec, cast

import msgspec
import psutil
import pytest

from mlx_server.engine import client, engine_process, messages
from mlx_server.engine.blas import fast_blas
from mlx_server.engine.client import EngineClient
from mlx_server.engine.kv_cost import KvCost
from mlx_server.engine.messages import (
    Admitted,
    Generate,
    LimitCache,
    LoadModel,
    ModelLoadFailed,
    ModelLoading,
    ModelUnloaded,
    Prefilled,
    PromptLogprobs,
    Report,
    RowTurnedAway,
    StepOutput,
    Token,
)
from mlx_server.engine.row_stream import Item, RowStream
from mlx_server.engine.worker_arguments import WorkerArguments, encode_arguments
from mlx_server.errors import (
    EngineDied,
    GenerationFailed,
    InvalidGrammar,
    ModelUnusable,
    Overloaded,
    ShuttingDown,
)
from mlx_server.requests import SamplingParams
from tests.event_loops import NewLoop, on_each_loop, run_on
from tests.tiny import IM_END, tiny_llama
from tests.worker.batch_runs import Ask, a_prompt, alone, ids

pytestmark = pytest.mark.live

P = ParamSpec("P")

HANG = 60.0
"""Seconds after which whatever is still waiting waits for ever."""

ENDLESS = 1_000_000


def asynchronous(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), HANG))

    return run


@asynccontextmanager
async def running(path: Path | None = None, *, cache_bytes: int = 0) -> AsyncIterator[EngineClient]:
    """An engine process, with the model "tiny" loaded if there is a path to one."""
    engine = EngineClient(concurrency=4, cache_bytes=cache_bytes)
    await engine.start()
    try:
        if path:
            await engine.load("tiny", str(path), ignored)
        yield engine
    finally:
        await engine.stop()


def ignored(done: int, total: int) -> None: ...


def ask(tokens: int = 5, *, model: str = "tiny", prompt: int = 6, **rest: Any) -> Generate:
    fields: dict[str, Any] = {"stop_tokens": [], "sampling": SamplingParams(temperature=0), **rest}
    return Generate(row=-1, model=model, prompt=a_prompt(prompt), max_tokens=tokens, **fields)


async def answered(engine: EngineClient, *rows: Generate) -> list[list[Token]]:
    """Each row's tokens, when all have ended."""
    answers: dict[int, list[Token]] = {}
    async with engine.generate(rows) as feed:
        ended = 0
        while ended < len(rows):
            for item in await feed.take():
                if isinstance(item, Token):
                    answers.setdefault(item.row, []).append(item)
                    ended += item.finish is not None
    return [answers[row.row] for row in rows]


async def until_it_fails(engine: EngineClient, *rows: Generate) -> None:
    async with engine.generate(rows) as feed:
        while True:
            await feed.take()


async def first_token(feed: RowStream) -> None:
    while not any(isinstance(item, Token) for item in await feed.take()):
        pass


def freeze(engine: EngineClient) -> int:
    """The engine process stops where it is, until it is killed."""
    assert engine.pid
    os.kill(engine.pid, signal.SIGSTOP)
    return engine.pid


@asynchronous
async def test_a_model_is_loaded_and_several_requests_share_it(
    tiny_path: Path, tiny_model: Any
) -> None:
    progress: list[tuple[int, int]] = []
    async with running() as engine:
        loaded = await engine.load("tiny", str(tiny_path), lambda *bytes: progress.append(bytes))
        assert (loaded.model, loaded.vocabulary) == ("tiny", 320)
        assert progress[-1][0] == progress[-1][1] > 400_000
        requests = [[ask(9), ask(3, prompt=8)], [ask(20)], [ask(4, prompt=40)]]
        answers = await asyncio.gather(*(answered(engine, *rows) for rows in requests))
        for rows, answer in zip(requests, answers, strict=True):
            expected = [alone(tiny_model, Ask(row.prompt, row.max_tokens)) for row in rows]
            assert [ids(tokens) for tokens in answer] == [ids(tokens) for tokens in expected]
        assert len({row.row for rows in requests for row in rows}) == 4
        assert not engine._rows


@asynchronous
async def test_a_row_is_admitted_then_scored_then_generated(tiny_path: Path) -> None:
    async with (
        running(tiny_path) as engine,
        engine.generate([ask(2, prompt_logprobs=True)]) as feed,
    ):
        items: list[Item] = []
        while not (items and isinstance(items[-1], Token) and items[-1].finish):
            items += await feed.take()
        assert [type(item) for item in items] == [Admitted, PromptLogprobs, Prefilled, Token, Token]


@asynchronous
async def test_leaving_early_frees_the_rows(tiny_path: Path) -> None:
    async with running(tiny_path) as engine:
        steps: list[StepOutput] = []
        full, empty = asyncio.Event(), asyncio.Event()
        events = {(4, 2): full, (0, 0): empty}

        def on_step(step: StepOutput) -> None:
            steps.append(step)
            if event := events.get((len(step.tokens), step.waiting)):
                event.set()

        engine.on_step = on_step
        async with engine.generate([ask(ENDLESS) for _ in range(6)]):
            await full.wait()
            empty.clear()
        assert not engine._rows
        await empty.wait()

        steps.clear()
        (tokens,) = await answered(engine, ask(7))
        assert {token.row for step in steps for token in step.tokens} == {tokens[0].row}


@asynchronous
async def test_leaving_at_any_moment_leaves_nothing_behind(tiny_path: Path) -> None:
    """Cancels cross the last tokens of rows that end at the same time."""
    dice = random.Random(0)
    async with running(tiny_path) as engine:
        for _ in range(60):
            rows = [ask(dice.randint(1, 4), prompt_logprobs=dice.random() < 0.3) for _ in range(3)]
            wanted, items = dice.randrange(12), 0
            async with engine.generate(rows) as feed:
                while items < wanted and engine._rows:
                    items += len(await feed.take())
        assert not engine._rows
        steps: list[StepOutput] = []
        engine.on_step = steps.append
        assert len((await answered(engine, ask(6)))[0]) == 6
        assert steps[-1].waiting == 0


@asynchronous
async def test_a_row_that_fails_fails_its_request_alone(tiny_path: Path) -> None:
    async with running(tiny_path) as engine:
        bystander = asyncio.create_task(answered(engine, ask(40)))
        with pytest.raises(GenerationFailed, match="absent"):
            await until_it_fails(engine, ask(ENDLESS), ask(model="absent"))
        assert len((await bystander)[0]) == 40
        assert engine.alive
        assert not engine._rows


@asynchronous
async def test_a_grammar_that_can_t_be_used_fails_its_request_alone(tiny_path: Path) -> None:
    async with running() as engine:
        await engine.load("tiny", str(tiny_path), ignored, stop_tokens=[IM_END])
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
        (row,) = engine._rows
        engine._dispatch(RowTurnedAway(row, "other slow grammars are being compiled."))
        with pytest.raises(Overloaded, match="other slow grammars") as turned_away:
            await failing
        assert turned_away.value.status == 503
        assert "Retry-After" in turned_away.value.headers
        assert len((await answered(engine, ask(4)))[0]) == 4


@asynchronous
async def test_a_failed_request_says_so_as_often_as_it_is_asked(tiny_path: Path) -> None:
    async with running(tiny_path) as engine, engine.generate([ask(model="absent")]) as feed:
        for _ in range(3):
            with pytest.raises(GenerationFailed):
                await feed.take()


@asynchronous
async def test_a_load_that_fails_leaves_the_engine_serving(tiny_path: Path) -> None:
    async with running(tiny_path) as engine:
        with pytest.raises(ModelUnusable, match="No such file"):
            await engine.load("lost", "/nowhere", ignored)
        assert len((await answered(engine, ask()))[0]) == 5


@pytest.mark.alone
@asynchronous
async def test_what_rows_take_is_known_before_their_model_is_loaded(
    tiny_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    async with running() as engine:
        with pytest.raises(ModelUnusable, match=r"'odd' can't be loaded: .*missing"):
            await engine.kv_cost("odd", str(tmp_path))
        costs = [engine.kv_cost("tiny", str(tiny_path)) for _ in range(2)]
        assert await asyncio.gather(*costs) == [KvCost(2 * 2 * 2 * 16 * 4)] * 2
        pid = freeze(engine)
        waiting = asyncio.create_task(engine.kv_cost("tiny", str(tiny_path)))
        await asyncio.sleep(0)  # it has asked
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await waiting


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
            await engine.load("large", str(large), ignored)
            await answered(engine, ask(model="large", prompt=100))
            loaded = process.memory_info().rss
            await engine.unload("large")
            assert loaded - before > 0.9 * size
            assert loaded - process.memory_info().rss > 0.9 * size
        await first_token(feed)


@asynchronous
async def test_a_stream_goes_on_while_another_model_loads(tiny_path: Path, tmp_path: Path) -> None:
    large = tiny_llama(tmp_path / "large", hidden=1024, layers=4)
    reported: list[str] = []
    async with running(tiny_path) as engine, engine.generate([ask(ENDLESS)]) as feed:
        await first_token(feed)
        engine.on_step = lambda step: reported.append("step")
        await engine.load("large", str(large), lambda done, total: reported.append("piece"))
    pieces = [at for at, what in enumerate(reported) if what == "piece"]
    assert len(pieces) > 4
    assert all("step" in reported[one:next] for one, next in pairwise(pieces))


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
        await engine.load("tiny", str(tiny_path), ignored)
        assert len((await answered(engine, ask()))[0]) == 5


@asynchronous
async def test_a_load_that_is_given_up_fails(tiny_path: Path) -> None:
    async with running() as engine:
        pid = freeze(engine)
        load = asyncio.create_task(engine.load("tiny", str(tiny_path), ignored))
        unload = asyncio.create_task(engine.unload("tiny"))
        await asyncio.sleep(0)  # they have asked
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(ModelUnusable, match="unloaded"):
            await load
        await unload


@asynchronous
async def test_the_prompt_cache_is_kept_and_shrunk(tiny_path: Path) -> None:
    async def cached(engine: EngineClient) -> int:
        items: list[Item] = []
        async with engine.generate([ask(1, prompt=60)]) as feed:
            while not any(isinstance(item, Token) for item in items):
                items += await feed.take()
        (found,) = [item.cached_tokens for item in items if isinstance(item, Prefilled)]
        return found

    async with running(tiny_path, cache_bytes=1 << 20) as engine:
        assert await cached(engine) == 0
        assert await cached(engine) > 50
        engine.limit_cache(0)
        assert await cached(engine) == 0


@pytest.mark.parametrize(
    "late",
    [ModelLoading("tiny", 1, 2), ModelLoadFailed("tiny", ""), ModelUnloaded("tiny"), Admitted(0)],
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
            engine.limit_cache(0)
        except EngineDied:
            assert not engine.alive
        await asyncio.sleep(0)
    with pytest.raises(EngineDied):
        engine.limit_cache(0)
    await reading


def test_commands_of_one_turn_arrive_together() -> None:
    asyncio.run(_commands_in_two_turns())


async def _commands_in_two_turns() -> None:
    engine = EngineClient()
    ours, theirs = socket.socketpair()
    _, engine._writer = await asyncio.open_connection(sock=ours)
    theirs.setblocking(False)
    for _ in range(2):
        for number in range(3):
            engine.limit_cache(number)
        await asyncio.sleep(0)
    with theirs.makefile("rb") as stream:
        for _ in range(2):
            length = messages.length(stream.read(messages.HEADER_BYTES))
            commands = messages.decode_commands(stream.read(length))
            assert commands == [LimitCache(number) for number in range(3)]
    theirs.close()
    engine._writer.close()
    await engine._writer.wait_closed()


@asynchronous
async def test_a_load_given_up_leaves_the_engine_serving(tiny_path: Path) -> None:
    async with running(tiny_path) as engine:
        loading = asyncio.create_task(engine.load("second", str(tiny_path), ignored))
        await asyncio.sleep(0)  # it has been sent
        loading.cancel()
        third = await engine.load("third", str(tiny_path), ignored)
        assert third.model == "third"
        second, tiny = await answered(engine, ask(model="second"), ask())
        assert ids(second) == ids(tiny)


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
        assert not engine._rows
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
            scored: list[PromptLogprobs] = []
            while len(scored) < len(rows):
                scored += [item for item in await feed.take() if isinstance(item, PromptLogprobs)]
        for report in scored:
            assert [len(entry.top) for entry in report.logprobs] == [320] * 699


@asynchronous
async def test_killed_the_engine_fails_everyone_who_waits(tiny_path: Path) -> None:
    async with running(tiny_path) as engine:
        pid = freeze(engine)
        waiting = [
            asyncio.create_task(until_it_fails(engine, ask(ENDLESS), ask(ENDLESS))),
            asyncio.create_task(until_it_fails(engine, ask(ENDLESS))),
            asyncio.create_task(engine.load("second", str(tiny_path), ignored)),
        ]
        await asyncio.sleep(0)  # they have asked
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(HANG):
            found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in found] == [EngineDied] * 3
        assert not engine.alive
        assert not engine._rows

        with pytest.raises(EngineDied):
            await engine.load("tiny", str(tiny_path), ignored)
        with pytest.raises(EngineDied):
            async with engine.generate([ask()]):
                pytest.fail("there is nobody to ask")
        assert not engine._rows


@asynchronous
async def test_killed_while_it_decodes_the_engine_fails_what_is_under_way(tiny_path: Path) -> None:
    async with running(tiny_path) as engine:
        steps: asyncio.Queue[StepOutput] = asyncio.Queue()
        engine.on_step = steps.put_nowait
        request = asyncio.create_task(until_it_fails(engine, ask(ENDLESS)))
        while not (await steps.get()).tokens:
            pass
        assert engine.pid
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await request


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


@asynchronous
async def test_an_engine_that_does_not_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = shutil.which("false")
    assert nothing
    monkeypatch.setattr(sys, "executable", nothing)
    engine = EngineClient()
    with pytest.raises(EngineDied):
        await engine.start()
    assert not engine.alive
    await engine.stop()


@asynchronous
async def test_a_start_given_up_leaves_an_engine_that_works(tiny_path: Path) -> None:
    engine = EngineClient()
    starting = asyncio.create_task(engine.start())
    while not engine.alive:  # noqa: ASYNC110 - nothing tells when
        await asyncio.sleep(0)
    starting.cancel()
    try:
        await engine.load("tiny", str(tiny_path), ignored)
        assert len((await answered(engine, ask()))[0]) == 5
    finally:
        await engine.stop()


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
                await engine.load("second", str(tiny_path), fails)
        with pytest.raises(EngineDied):
            await request
        assert not engine.alive


@asynchronous
async def test_stop_ends_the_process_and_what_waits(
    tiny_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(tiny_path) as engine:
        assert engine.pid
        process = psutil.Process(engine.pid)
        async with engine.generate([ask(ENDLESS)]) as feed:
            await first_token(feed)
            request = asyncio.create_task(until_it_fails(engine, ask(ENDLESS)))
            load = asyncio.create_task(engine.load("second", str(tiny_path), ignored))
            await asyncio.sleep(0)  # they have asked
            await engine.stop(ShuttingDown("going"))
        assert not process.is_running()
        for task in (request, load):
            with pytest.raises(ShuttingDown):
                await task
        assert not engine.alive
        await engine.stop()
        await asyncio.gather(engine.stop(), engine.stop())
    assert capfd.readouterr().err == ""


@asynchronous
async def test_stop_ends_a_process_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "STOP_SECONDS", 0.1)
    async with running() as engine:
        process = psutil.Process(freeze(engine))
        await engine.stop()
        assert not process.is_running()


@asynchronous
async def test_stop_of_what_was_never_started_is_harmless() -> None:
    engine = EngineClient()
    assert not engine.alive
    await engine.stop()


@asynchronous
async def test_a_process_that_runs_already_becomes_the_engine(tiny_path: Path) -> None:
    before = {*psutil.Process().children()}
    early = engine_process.EarlyProcess()
    engine = EngineClient(concurrency=4, early=early)
    await engine.start()
    try:
        assert engine.pid == early.pid
        await engine.load("tiny", str(tiny_path), ignored)
        assert len((await answered(engine, ask()))[0]) == 5
        begun = {*psutil.Process().children()} - before
        assert len(begun) == 2, "the engine and its lifeline"
    finally:
        await engine.stop()
    assert not psutil.pid_exists(early.pid)


@asynchronous
async def test_an_interrupt_is_not_for_the_engine(tiny_path: Path) -> None:
    async with running(tiny_path) as engine:
        assert engine.pid
        assert os.getpgid(engine.pid) != os.getpgid(0)  # a terminal's Ctrl-C goes to a group
        os.kill(engine.pid, signal.SIGINT)
        assert len((await answered(engine, ask()))[0]) == 5


@pytest.mark.parametrize("preloaded", [None, "libm.so.6"])
@asynchronous
async def test_the_engine_gets_the_fast_blas(
    preloaded: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (blas := fast_blas()):
        pytest.skip("no faster BLAS here")
    if preloaded:
        monkeypatch.setenv("LD_PRELOAD", preloaded)
    else:
        monkeypatch.delenv("LD_PRELOAD", raising=False)
    async with running() as engine:
        environment = psutil.Process(engine.pid).environ()
    assert environment["LD_PRELOAD"] == (f"{preloaded}:{blas}" if preloaded else blas)


SERVER = """
import asyncio
from mlx_server.engine.client import EngineClient

async def main():
    engine = EngineClient()
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_engine_goes_when_its_server_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
        assert server.stdout
        pid = int(server.stdout.readline())
        assert psutil.pid_exists(pid)
        server.kill()
        # The engine inherited the pipe: it ends when both are gone.
        server.communicate(timeout=HANG)


def test_an_engine_that_never_says_a_word_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = tmp_path / "python"
    mute.write_text("#!/bin/sh\nexec sleep 60\n")
    mute.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(mute))
    monkeypatch.setattr("mlx_server.engine.engine_process.fast_blas", lambda: None)
    monkeypatch.setattr(client, "START_SECONDS", 0.2)

    async def start() -> EngineClient:
        engine = EngineClient()
        with pytest.raises(EngineDied, match="was not ready"):
            await engine.start()
        await engine.stop()
        return engine

    engine = asyncio.run(asyncio.wait_for(start(), HANG))
    assert engine.pid is not None
    assert not psutil.pid_exists(engine.pid)


@pytest.mark.parametrize("arguments", [(encode_arguments(WorkerArguments()).decode(),), ()])
def test_a_server_gone_before_the_engine_is_ready_is_no_error(arguments: tuple[str, ...]) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "mlx_server.worker.process", str(theirs.fileno()), *arguments]
    ours.close()
    with theirs:
        run = subprocess.run(
            command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, timeout=HANG
        )
    assert (run.returncode, run.stderr) == (0, b"")


def test_the_engine_goes_when_its_server_left_reports_unread() -> None:
    """A socket closed with something unread in it ends the other side's reading with an error."""
    ours, theirs = socket.socketpair()
    arguments = encode_arguments(WorkerArguments(concurrency=4)).decode()
    module = "mlx_server.worker.process"
    command = [sys.executable, "-m", module, str(theirs.fileno()), arguments]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as worker:
        theirs.close()
        ours.settimeout(HANG)
        with ours.makefile("rb") as ready:
            ready.read(messages.length(ready.read(messages.HEADER_BYTES)))
        ours.sendall(messages.frame(messages.encode_commands([LoadModel("lost", "/nowhere")])))
        assert select.select([ours], [], [], HANG)[0]
        ours.close()
        try:
            worker.wait(HANG)
        finally:
            worker.kill()
