"""Real groups of ranks on loopback, each started by a real engine process."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from mlx_server.engine.client import EngineClient, RowStream
from mlx_server.engine.messages import (
    Embed,
    Embedded,
    Generate,
    LoadModel,
    PreemptRows,
    PromptLogprobs,
    ResumeRows,
    Token,
)
from mlx_server.engine.worker_arguments import Mode, RankGroup, WorkerArguments
from mlx_server.errors import EngineDied, ModelUnusable
from mlx_server.requests import SamplingParams
from tests.engine.clients import asynchronous
from tests.live.ranks import loopback_group
from tests.live.server import assert_gone
from tests.tiny import IM_END, tiny_llama
from tests.worker.batch_runs import a_prompt
from tests.worker.engine_runs import grammar_of
from tests.worker.kinds import CONFIGS, Kind

NOTICED = 20.0
"""Seconds in which the loss of a rank is an error, on a busy machine too."""

GREEDY = SamplingParams(temperature=0)
FOUR_HEADS = {"num_key_value_heads": 4}


@asynccontextmanager
async def running(group: RankGroup | None = None) -> AsyncIterator[EngineClient]:
    engine = EngineClient(WorkerArguments(concurrency=4, cache_bytes=64 << 20, group=group))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def load(
    engine: EngineClient, path: Path, model: str = "m", kv_bits: int | None = None
) -> None:
    await engine.load(
        LoadModel(model, str(path), [IM_END], str(path), kv_bits), lambda done, total: None
    )


def ask(prompt: list[int], tokens: int = 16, model: str = "m", **more: object) -> Generate:
    sampling = more.pop("sampling", GREEDY)
    assert isinstance(sampling, SamplingParams)
    return Generate(0, model, prompt, tokens, [], sampling, **more)  # type: ignore[arg-type]


async def answered(engine: EngineClient, *rows: Generate) -> list[list[Token]]:
    async with engine.generate(rows) as feed:
        return await answers_of(feed, rows)


async def answers_of(feed: RowStream, rows: Sequence[Generate]) -> list[list[Token]]:
    found: dict[int, list[Token]] = {row.row: [] for row in rows}
    while not all(tokens and tokens[-1].finish for tokens in found.values()):
        for item in await feed.take():
            if isinstance(item, Token):
                found[item.row].append(item)
    return list(found.values())


def ids(answers: list[list[Token]]) -> list[list[int]]:
    return [[token.id for token in answer] for answer in answers]


def the_others(engine: EngineClient) -> list[psutil.Process]:
    found = psutil.Process(engine.pid).children()
    return [each for each in found if "mlx_server.worker.ranks.follower" in each.cmdline()]


def a_batch(model: str, tokens: int = 16) -> list[Generate]:
    """Prompts of other lengths, one in several pieces."""
    return [ask(a_prompt(length), tokens, model) for length in (5, 40, 300)]


@pytest.mark.parametrize(
    ("mode", "ranks", "names"),
    [
        ("tensor", 2, ("llama", "qwen3", "qwen3_moe", "gpt_oss")),
        ("pipeline", 2, ("qwen3_moe", "qwen2", "glm4_moe")),
        ("pipeline", 4, ("qwen3_moe",)),
    ],
)
@asynchronous
async def test_the_tokens_are_those_of_one_process(
    mode: Mode, ranks: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    sizes = {**FOUR_HEADS, **({"num_hidden_layers": 4} if mode == "pipeline" else {})}
    paths = {name: Kind(name, {**CONFIGS[name], **sizes}).save(tmp_path / name) for name in names}
    async with running() as one, running(loopback_group(ranks, mode)) as group:
        for name, path in paths.items():
            for engine in (one, group):
                await load(engine, path, name)
            tokens = 32 // ranks  # ranks that wait for each other keep all processors busy
            expected = ids(await answered(one, *a_batch(name, tokens)))
            assert ids(await answered(group, *a_batch(name, tokens))) == expected
            # and from the prompt cache of each rank
            assert ids(await answered(group, *a_batch(name, tokens))) == expected
            await group.unload(name)


@asynchronous
async def test_ranks_with_other_numbers_of_layers_keep_no_prompts(tmp_path: Path) -> None:
    """The same limit would have each of them drop other prompts."""
    odd = Kind("qwen2", {**CONFIGS["qwen2"], "num_hidden_layers": 3}).save(tmp_path / "odd")
    cached: list[int] = []
    found = []
    for group in (None, loopback_group(2, "pipeline")):
        async with running(group) as engine:
            await load(engine, odd)
            engine.on_step = lambda step: cached.append(step.cache_bytes)
            found.append(ids(await answered(engine, *a_batch("m"))))
            assert bool(cached[-1]) == (group is None)
    assert found[0] == found[1]


MIX = [
    SamplingParams(seed=1, logprobs=3),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9, top_k=20, min_p=0.01),
    SamplingParams(seed=3, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1),
    SamplingParams(temperature=0, logit_bias={7: 5.0}, logprobs=0),
]
LETTERS = "start: /[a-z]{3,40}/\n"


def mixed() -> list[Generate]:
    rows = [ask(a_prompt(20 + i), 40, sampling=each) for i, each in enumerate(MIX)]
    rows[1].grammar = rows[3].grammar = grammar_of(LETTERS)
    return rows


@pytest.mark.parametrize("mode", ["tensor", "pipeline"])
@asynchronous
async def test_seeds_logprobs_penalties_and_grammars_are_those_of_one_process(
    mode: Mode, tmp_path: Path
) -> None:
    path = tiny_llama(tmp_path / "tiny")
    if mode == "pipeline":  # llama has none in mlx-lm
        model = Kind("qwen2", CONFIGS["qwen2"]).save(tmp_path / "qwen2")
        (model / "tokenizer.json").write_bytes((path / "tokenizer.json").read_bytes())
        path = model
    async with running() as one, running(loopback_group(2, mode)) as group:
        found = []
        for engine in (one, group):
            await load(engine, path)
            found.append(await answered(engine, *mixed()))
        assert ids(found[1]) == ids(found[0])
        assert near(found[1]) == near(found[0])
        same = [ask(a_prompt(150), 12, sampling=MIX[0], deterministic=True) for _ in range(2)]
        (alone,) = await answered(group, same[0])
        in_company, *_ = await answered(group, same[1], *mixed())
        assert [(t.id, t.logprobs) for t in in_company] == [(t.id, t.logprobs) for t in alone]


def near(answers: list[list[Token]]) -> list[list[object]]:
    return [
        [
            t.logprobs and (round(t.logprobs.chosen or 0, 3), [id for id, _ in t.logprobs.top])
            for t in answer
        ]
        for answer in answers
    ]


@asynchronous
async def test_embeddings_scores_and_8_bit_caches_are_those_of_one_process(tmp_path: Path) -> None:
    path = Kind("qwen3", {**CONFIGS["qwen3"], **FOUR_HEADS, "head_dim": 64}).save(tmp_path / "m")
    async with running() as one, running(loopback_group(2)) as group:
        answers, vectors, scores = [], [], []
        for engine in (one, group):
            await load(engine, path, kv_bits=8)
            answers.append(ids(await answered(engine, *a_batch("m"))))
            vectors.append(await vectors_of(engine, [a_prompt(9), a_prompt(30, 1)]))
            scores.append(await prompt_scores(engine, a_prompt(60)))
    assert answers[0] == answers[1]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-4)
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-3)


async def vectors_of(engine: EngineClient, texts: list[list[int]]) -> list[NDArray[np.float32]]:
    async with engine.embed([Embed(0, "m", texts)]) as feed:
        (found,) = await feed.take()
    assert isinstance(found, Embedded)
    return [np.frombuffer(vector, np.float32) for vector in found.vectors]


async def prompt_scores(engine: EngineClient, prompt: list[int]) -> list[float]:
    """The log probability of each token of a prompt but the first."""
    async with engine.generate([ask(prompt, 1, prompt_logprobs=True)]) as feed:
        while True:
            for item in await feed.take():
                if isinstance(item, PromptLogprobs):
                    return [each.chosen or 0.0 for each in item.logprobs]


@asynchronous
async def test_rows_come_and_go_at_any_step(tmp_path: Path) -> None:
    """Rows without a seed, cancelled, paused and preempted ones: the ranks go on together, or the
    comparison of their tokens would end them."""
    dice = random.Random(22)
    path = tiny_llama(tmp_path / "tiny")
    async with running(loopback_group(2)) as group:
        await load(group, path)
        (expected,) = ids(await answered(group, ask(a_prompt(30), 24)))

        async def one_that_leaves() -> None:
            await asyncio.sleep(dice.random())
            prompt = a_prompt(dice.randrange(2, 400), dice.randrange(5))
            row = ask(prompt, 200, sampling=dice.choice(ANY))
            row.grammar = grammar_of(dice.choice([None, None, "start: /[a-z]+/\n"]))
            async with group.generate([row]) as feed:
                for _ in range(dice.randrange(12)):
                    await feed.take()
                if dice.random() < 0.5:
                    group.send(PreemptRows(feed.rows))
                    group.send(ResumeRows(feed.rows))
                    await feed.take()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(40):
                tasks.create_task(one_that_leaves())
        assert ids(await answered(group, ask(a_prompt(30), 24))) == [expected]
        rows = [ask(a_prompt(9, i), 64, sampling=SamplingParams()) for i in (1, 2)]
        assert [len(answer) for answer in await answered(group, *rows)] == [64, 64]
        assert group.alive


ANY = [SamplingParams(), GREEDY, SamplingParams(temperature=0.5, top_k=5), SamplingParams(seed=5)]


@asynchronous
async def test_idle_ranks_use_no_processor(tmp_path: Path) -> None:
    async with running(loopback_group(2)) as group:
        await load(group, tiny_llama(tmp_path / "tiny"))
        await answered(group, ask(a_prompt(9)))
        ranks = [psutil.Process(group.pid), *the_others(group)]
        before = [sum(rank.cpu_times()[:2]) for rank in ranks]
        await asyncio.sleep(3)
        used = [sum(rank.cpu_times()[:2]) - b for rank, b in zip(ranks, before, strict=True)]
        assert max(used) < 0.3, "they wait in a collective, which spins"


@asynchronous
async def test_a_model_that_can_t_be_split_says_why(tmp_path: Path) -> None:
    async with running(loopback_group(2)) as group:
        odd = Kind("llama", {**CONFIGS["llama"], "num_key_value_heads": 1}).save(tmp_path / "odd")
        with pytest.raises(ModelUnusable, match=r"num_key_value_heads \(1\) can't be split evenly"):
            await load(group, odd)
        unsplit = Kind("gemma", CONFIGS["gemma"]).save(tmp_path / "gemma")
        with pytest.raises(ModelUnusable, match="can't split gemma in mode tensor"):
            await load(group, unsplit)
        await load(group, tiny_llama(tmp_path / "tiny"))
        assert len((await answered(group, ask(a_prompt(9), 5)))[0]) == 5


@pytest.mark.parametrize(
    ("rank", "stage", "sent"), [(1, "decode", signal.SIGSTOP), (0, "load", signal.SIGKILL)]
)
@asynchronous
async def test_a_lost_rank_is_an_error_and_leaves_nothing_running(
    rank: int, stage: str, sent: signal.Signals, tmp_path: Path
) -> None:
    path = tiny_llama(tmp_path / "tiny")
    async with running(loopback_group(2)) as group:
        ranks = [psutil.Process(group.pid), *the_others(group)]
        with pytest.raises(EngineDied, match=r"(?i)send the request again"):
            async with asyncio.timeout(NOTICED):
                await up_to(stage, group, path, lambda: ranks[rank].send_signal(sent))
    assert_gone(ranks)


async def up_to(stage: str, group: EngineClient, path: Path, lose: Callable[[], None]) -> None:
    if stage == "load":
        lose()
    await load(group, path)
    if stage == "prefill":
        lose()
    async with group.generate([ask(a_prompt(300), 100_000)]) as feed:
        while not any(isinstance(item, Token) for item in await feed.take()):
            pass
        lose()
        while True:
            await feed.take()
