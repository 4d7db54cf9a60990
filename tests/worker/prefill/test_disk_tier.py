"""Prompts that come back from disk: the same answers as a cold engine's, and no others' prompts."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.engine.messages import (
    CancelRows,
    ComputeAhead,
    ComputedAhead,
    Generate,
    LimitCache,
    LoadModel,
    StepOutput,
    UnloadModel,
)
from mlx_server.prompt_files.folder import PromptFolder
from mlx_server.prompt_files.names import PromptFile
from mlx_server.worker.mlx_lm_internals import KVCache
from mlx_server.worker.prefill import disk_tier, stored_prompt
from tests.worker.batch_runs import a_prompt
from tests.worker.kinds import KINDS, SIZES
from tests.worker.lora_files import mlx_adapter, network
from tests.worker.one_pass import expected
from tests.worker.prefill.disk_runs import BLOCK, MOST, Process, Start, words
from tests.worker.test_kinds import GREEDY, Bench

pytestmark = pytest.mark.usefixtures("_at_once")

DISK = 350_000
"""Bytes: sessions push each other's files off it."""


def on_disk(folder: Path) -> int:
    """The bytes of all files while some come and go."""
    nbytes = 0
    for entry in folder.iterdir():
        with suppress(FileNotFoundError):
            nbytes += entry.stat().st_blocks * 512
    return nbytes


@pytest.mark.slow
def test_answers_after_a_restart_are_those_of_a_cold_engine(
    path: Path, tmp_path: Path, start: Start
) -> None:
    model = network(path)
    system = words(0, 150)
    first = [*system, *words(1, 150)]
    process = start(path, tmp_path)
    said = process.answer(first, branches=[150, 290])
    assert process.cached == 0
    process.stop()

    after = start(path, tmp_path)
    turns = [
        [*first, *said, *words(2, 20)],  # the next turn
        [*system, *words(3, 90)],  # another chat with the same system prompt
        [*first[:290], *words(4, 40)],  # another last question
        [*system, *words(3, 90), *words(5, 90)],
    ]
    known = []
    for turn in turns:
        answer = after.answer(turn)
        assert answer == expected(model, turn, answer, 8)
        known.append(after.cached)
    assert known[0] >= len(first)
    assert known[1] >= 150 // BLOCK * BLOCK
    assert known[2] >= 290 // BLOCK * BLOCK
    assert after.total("hits") >= 1
    assert after.total("tokens") >= len(first)


@pytest.mark.slow
def test_sessions_with_restarts_in_the_middle(path: Path, tmp_path: Path, start: Start) -> None:
    """Thoughts of earlier turns are dropped, so each prompt leaves the one before."""
    model, process = network(path), start(path, tmp_path)
    history, prompt_tokens, seen, again = words(7, 200), 0, [0], 0
    for turn in range(6):
        last = len(history)
        history += words(20 + turn, 60)
        prompt = [*history, 301, 302]
        answer = process.answer(prompt, branches=[200, last, len(history)])
        assert answer == expected(model, prompt, answer, 8)
        again += max(0, min(seen[-1], len(prompt)) - process.cached)
        prompt_tokens += len(prompt)
        seen.append(len(history))
        history += answer[4:]
        if turn in (1, 3):
            process.stop()
            process = start(path, tmp_path)
    assert again <= 2 * BLOCK + 0.02 * prompt_tokens, "of each restart less than a block is lost"


@pytest.mark.slow
def test_random_sessions(path: Path, tmp_path: Path, start: Start) -> None:
    """They branch anywhere, have keys, restart, and push each other off a small disk."""
    random, model = Random(0), network(path)
    process, prompts, hits = start(path, tmp_path, DISK), [words(0, 100)], 0
    for turn in range(14):
        before = random.choice(prompts)
        cut = random.choice([len(before), random.randrange(len(before))])
        prompt = [*before[:cut], *words(turn, random.randint(1, 90))]
        scope = random.choice(["", "", "key"])
        places = sorted(random.sample(range(len(prompt)), min(2, len(prompt))))
        said = process.answer(prompt, 4, branches=places, cache_scope=scope)
        assert said == expected(model, prompt, said, 4)
        prompts.append([*prompt, *said[: random.randint(0, 4)]])
        if random.random() < 0.4:
            hits += process.total("hits")
            process.stop()
            process = start(path, tmp_path, DISK)
    assert hits + process.total("hits") > 0


@pytest.mark.slow
def test_a_long_session_takes_the_disk_of_one_cache(
    path: Path, tmp_path: Path, start: Start
) -> None:
    process = start(path, tmp_path)
    history = words(1, 200)
    for turn in range(12):
        history += words(30 + turn, 36)
        said = process.answer(history, 2, branches=[200, len(history) - 36, len(history)])
        history += said
    assert process.folder
    process.write()
    memory = process.engine._cache.nbytes
    overhead = 4096 + 2048 * 2  # of each file: the rest of a unit, and its header
    assert process.folder.nbytes <= 1.5 * memory + overhead * process.folder.count
    assert process.folder.count <= len(history) // BLOCK + 20


def test_what_another_model_replaced_in_memory_comes_back(llama: Path, tmp_path: Path) -> None:
    process = Process(llama, tmp_path)
    prompt = words(1, 200)
    process.rows += 1
    process.engine.handle(Generate(process.rows, "m", prompt, 1, [], GREEDY))
    while process.engine._is_busy:
        process.engine.step()
    process.engine.handle(LimitCache(0))  # at once: there was no time to write
    process.engine.handle(UnloadModel("m"))
    process.engine.handle(LimitCache(1 << 30))
    process.load()
    process.answer([*prompt, 1, 2, 3])
    assert process.cached == 200
    process.stop()


def test_a_prompt_that_parts_within_a_block_uses_what_it_shares(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    process = start(llama, tmp_path)
    process.answer(a_prompt(5 * BLOCK))
    process.write()
    process.engine.handle(LimitCache(0))
    process.engine.handle(LimitCache(1 << 30))
    shared = 2 * BLOCK + BLOCK // 2 + 8
    prompt = [*a_prompt(5 * BLOCK)[:shared], *a_prompt(40, seed=9)]
    answer = process.answer(prompt)
    assert process.cached == shared
    assert answer == Bench(llama).answer(prompt, tokens=8)


@pytest.mark.slow
def test_a_prompt_comes_back_though_the_prompt_cache_has_no_room(
    path: Path, tmp_path: Path, start: Start
) -> None:
    """Its row has the memory for it."""
    process = start(path, tmp_path)
    process.answer(first := a_prompt(5 * BLOCK))
    process.write()
    process.engine.handle(LimitCache(0))
    second = [*first, *a_prompt(40, seed=9)]
    process.answer(second)
    assert process.cached >= len(first) - 1
    assert not process.engine._cache._held._holds


@pytest.mark.parametrize(
    "other",
    [
        {"cache_scope": "another key"},
        {"adapter": "digest"},
        {"adapter": "digest", "adapter_scale": 0.5},
    ],
    ids=str,
)
def test_no_other_key_or_adapter_hits(
    llama: Path, tmp_path: Path, start: Start, other: dict[str, Any]
) -> None:
    adapter = mlx_adapter(tmp_path / "lora", llama)
    process = start(llama, tmp_path / "disk", adapter=adapter)
    prompt = words(1, 200)
    process.answer(prompt)
    process.stop()
    after = start(llama, tmp_path / "disk", adapter=adapter)
    after.answer(prompt, **other)
    assert after.cached == 0
    after.stop()
    last = start(llama, tmp_path / "disk", adapter=adapter)
    last.answer(prompt, **other)
    assert last.cached == 199


def test_other_files_of_the_model_miss(tmp_path: Path, start: Start) -> None:
    path = KINDS[0].save(tmp_path / "model")
    process = start(path, tmp_path / "disk")
    prompt = words(1, 200)
    process.answer(prompt)
    process.stop()
    weights = path / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    after = start(path, tmp_path / "disk")
    after.answer(prompt)
    assert after.cached == 0


@pytest.mark.parametrize("is_stored", [True, False])
def test_what_is_computed_ahead_is_written_unless_the_request_is_not_stored(
    llama: Path, tmp_path: Path, start: Start, is_stored: bool
) -> None:
    process, prompt, answer = start(llama, tmp_path), words(1, 200), words(2, 200)
    process.answer(prompt, on_disk=is_stored)
    process.write()
    before = process.total("written_bytes")
    process.engine.handle(ComputeAhead("m", [*prompt, *answer], 4096, on_disk=is_stored))
    process.settle()
    computed = [r.computed for r in process.reports if isinstance(r, ComputedAhead)]
    assert sum(computed) >= len(answer)
    process.write()
    process.stop()
    assert (process.total("written_bytes") > before) == is_stored
    after = start(llama, tmp_path)
    after.answer([*prompt, *answer, 1, 2])
    assert after.cached == (len(prompt) + len(answer) if is_stored else 0)


@pytest.mark.parametrize("bits", [8, 4])
def test_keys_and_values_in_fewer_bits_come_back(
    llama: Path, tmp_path: Path, start: Start, bits: int
) -> None:
    prompt = words(1, 200)
    process = start(llama, tmp_path, kv_bits=bits)
    process.answer(prompt)
    process.stop()
    after, cold = (start(llama, folder, kv_bits=bits) for folder in (tmp_path, None))
    following = [*prompt, *words(2, 30)]
    assert after.answer(following) == cold.answer(following)
    assert after.cached >= len(prompt)
    after.stop()
    whole = start(llama, tmp_path)
    whole.answer(following)
    assert whole.cached == 0, "the caches of other bits are others"


def test_what_a_client_does_not_want_stored_stays_off_the_disk(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    process = start(llama, tmp_path)
    public, private = words(1, 200), words(2, 200)
    process.answer(private, on_disk=False)
    process.write()
    assert process.folder
    assert process.folder.count == 0
    process.answer(public)
    process.answer([*public, *private], on_disk=False)
    process.stop()
    after = start(llama, tmp_path)
    after.answer([*public, *private])
    assert after.cached in range(200, 200 + 9)  # the public answer may be known too
    after.answer(private)
    assert after.cached == 0


def test_a_cache_of_a_class_that_is_not_in_the_table_stays_in_memory(
    llama: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(KVCache):  # type: ignore[misc]
        """May keep what no file would have."""

    layers = SIZES["num_hidden_layers"]
    monkeypatch.setattr(
        stored_prompt, "make_caches", lambda network: [Own() for _ in range(layers)]
    )
    process, prompt = start(llama, tmp_path), words(1, 200)
    process.answer(prompt)
    process.write()
    assert process.folder
    assert process.folder.count == 0
    process.answer(prompt)
    assert process.cached == 199


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_prompt_with_invalid_values_leaves_no_files(
    llama: Path, tmp_path: Path, start: Start, is_refused: bool
) -> None:
    """Also while nothing is written because the disk has refused a file."""
    process = start(llama, tmp_path)
    process.answer(words(1, 200))
    process.write()
    assert process.folder
    assert process.folder.count > 0
    if is_refused:
        process.engine._disk._saver._paused_until = float("inf")
    process.engine._disk.forget("m")
    process.stop()
    assert process.folder.count == 0


@pytest.mark.slow
def test_the_limit_holds_over_many_sessions(llama: Path, tmp_path: Path, start: Start) -> None:
    most = 300_000
    process = start(llama, tmp_path, most)
    for session in range(40):
        process.answer(words(session, 150))
        assert on_disk(tmp_path) <= most
    process.stop()
    assert on_disk(tmp_path) <= most
    after = start(llama, tmp_path, most)
    after.answer(words(39, 150))
    assert after.cached == 149, "the latest is there"
    after.answer(words(0, 150))
    assert after.cached == 0


def test_only_one_engine_uses_a_folder(
    llama: Path, tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    start(llama, tmp_path)
    assert disk_tier.opened(tmp_path, MOST) is None
    assert "another server uses the folder" in caplog.text


@pytest.mark.parametrize("why", ["full", "read-only"])
def test_a_disk_that_takes_no_more_is_a_line_in_the_log(
    llama: Path,
    tmp_path: Path,
    start: Start,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuses(self: PromptFolder, *arguments: Any) -> int:
        raise OSError(28 if why == "full" else 30, why)

    monkeypatch.setattr(PromptFolder, "write", refuses)
    process, cold = start(llama, tmp_path), start(llama, None)
    for seed in range(3):
        assert process.answer(words(seed, 200)) == cold.answer(words(seed, 200))
    process.stop()
    assert caplog.text.count("can't be written to disk") == 1


def test_a_folder_that_cant_be_made_is_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert disk_tier.opened(tmp_path / "file" / "folder", MOST) is None
    assert "can't be used" in caplog.text


def test_bytes_that_wait_for_the_disk_are_limited(
    llama: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk takes nothing, one file waits and no other is prepared."""
    monkeypatch.setattr(limits, "PROMPT_WRITE_BYTES", 1)
    goes_on, write, begun = Event(), PromptFolder.write, []

    def slow(self: PromptFolder, file: PromptFile, pieces: Sequence[memoryview]) -> int:
        begun.append(file)
        goes_on.wait(30)
        return write(self, file, pieces)

    monkeypatch.setattr(PromptFolder, "write", slow)
    process = start(llama, tmp_path)
    process.answer(words(1, 400))
    assert process.engine.pause is None, "it waits for the disk"
    assert len(process.engine._disk._saver._writes) == 1
    assert process.folder
    assert process.folder.count == 0
    goes_on.set()
    process.stop()
    assert process.folder.count == len(begun) == 400 // BLOCK + 1


def test_what_the_disk_has_not_taken_yet_is_waited_for(
    llama: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk goes on only when the unload waits for it."""
    goes_on, write = Event(), PromptFolder.write

    def held_up(self: PromptFolder, file: PromptFile, pieces: Sequence[memoryview]) -> int:
        goes_on.wait(30)
        return write(self, file, pieces)

    def waited(futures: Sequence[Future[None]], seconds: float) -> None:
        goes_on.set()
        wait(futures, max(seconds, 30))

    monkeypatch.setattr(PromptFolder, "write", held_up)
    monkeypatch.setattr(disk_tier, "wait", waited)
    process, prompt = start(llama, tmp_path), words(1, 200)
    process.answer(prompt)
    assert not goes_on.is_set()
    process.engine.handle(UnloadModel("m"))
    known = process.folder.count if process.folder else 0
    goes_on.set()
    assert known == 200 // BLOCK + 1
    process.load()
    process.answer([*prompt, 1, 2, 3])
    assert process.cached == 200


class Leaving:
    """A prompt that a beginning row evicts in the moment in which it was computed."""

    def __init__(self, process: Process, **fields: Any) -> None:
        self.process, self.prompt = process, words(1, 300)
        process.rows += 1
        first = Generate(process.rows, "m", self.prompt, 1, [], GREEDY, branches=[90, 200])
        for name, value in fields.items():
            setattr(first, name, value)
        process.engine.handle(first)
        while process.engine._is_busy:
            process.engine.step()
        assert process.folder
        assert process.folder.count == 0
        process.engine.handle(Generate(0, "m", words(2, 40), 4, [], GREEDY))
        process.engine.handle(LimitCache(0))
        assert not process.engine._disk._saver._writes, "nothing is copied, and no row waits"

    def asked_again(self) -> int:
        """The tokens that are known of it afterwards."""
        self.process.settle()
        self.process.write()
        assert not self.process.engine._disk._saver._leaving.nbytes
        self.process.engine.handle(LimitCache(1 << 30))
        self.process.answer([*self.prompt, 1, 2, 3])
        return self.process.cached


@pytest.mark.slow
def test_what_a_beginning_row_evicts_is_written_after_it(
    path: Path, tmp_path: Path, start: Start
) -> None:
    leaving = Leaving(start(path, tmp_path))
    assert leaving.asked_again() >= 299
    after = [*leaving.prompt, 1, 2, 3]
    assert leaving.process.answer([*after, 4]) == start(path, None).answer([*after, 4])


@pytest.mark.slow
def test_of_what_is_too_large_to_wait_the_beginning_is_written(
    path: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(path, tmp_path)
    process.answer(words(1, 300), on_disk=False)
    limit = process.engine._cache.nbytes * 9 // 10
    process.engine.handle(LimitCache(0))
    process.engine.handle(LimitCache(1 << 30))
    monkeypatch.setattr(limits, "PROMPT_WRITE_BYTES", limit)
    leaving = Leaving(process)
    assert 0 < process.engine._disk._saver._leaving.nbytes <= limit
    assert 90 <= leaving.asked_again() < 300
    after = [*leaving.prompt, 1, 2, 3]
    assert process.answer([*after, 4]) == start(path, None).answer([*after, 4])


def test_what_the_disk_may_not_or_can_not_have_does_not_wait_for_it(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    private = start(llama, tmp_path / "private")
    assert Leaving(private, on_disk=False).asked_again() == 0
    refused = start(llama, tmp_path / "refused")
    refused.engine._disk._saver._paused_until = float("inf")
    Leaving(refused)
    assert not refused.engine._disk._saver._leaving.nbytes
    invalid = start(llama, tmp_path / "invalid")
    leaving = Leaving(invalid)
    invalid.engine._disk.forget("m")
    assert leaving.asked_again() == 0
    failed = start(llama, tmp_path / "failed")
    leaving = Leaving(failed)
    failed.engine._device_failed(RuntimeError("[METAL] Command buffer execution failed: x"))
    assert leaving.asked_again() == 0


def test_what_is_unloaded_while_a_row_of_another_model_runs_is_written(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    process, prompt = start(llama, tmp_path), words(1, 200)
    process.engine.handle(LoadModel("other", str(llama)))
    process.settle()
    process.rows += 1
    process.engine.handle(Generate(process.rows, "m", prompt, 1, [], GREEDY))
    while process.engine._is_busy:
        process.engine.step()
    process.engine.handle(Generate(0, "other", words(2, 40), 4, [], GREEDY))
    process.engine.handle(UnloadModel("m"))
    process.settle()
    process.write()
    process.load()
    process.answer([*prompt, 1, 2, 3])
    assert process.cached == 200


def test_pieces_ahead_and_pieces_for_the_disk_alternate(
    llama: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_server.worker.ahead.PIECE_SECONDS", 1e-6)
    process, done = start(llama, tmp_path), list[str]()
    process.rows += 1
    process.engine.handle(Generate(process.rows, "m", words(1, 400), 1, [], GREEDY))
    while process.engine._is_busy:
        process.engine.step()
    ahead, saver = process.engine._ahead, process.engine._disk._saver

    def noted(name: str, work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(argument: Any) -> Any:
            done.append(name)
            return work(argument)

        return run

    monkeypatch.setattr(ahead, "step", noted("ahead", ahead.step))
    monkeypatch.setattr(saver, "save_piece", noted("disk", saver.save_piece))
    tokens = [*words(1, 400), *words(2, 1500)]
    process.engine.handle(ComputeAhead("m", tokens, 4096))
    process.settle()
    assert done[:6] == ["disk", "ahead"] * 3
    process.answer([*tokens, 1, 2])
    assert process.cached == len(tokens)


def test_nothing_is_written_between_steps_but_single_pieces(
    llama: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "OLD_SECONDS", 0.0)
    monkeypatch.setattr(disk_tier, "BUSY_SECONDS", 0.0)
    pieces: list[int] = []
    save = disk_tier.PromptSaver.save_piece

    def counted(self: Any, prompt: Any) -> None:
        pieces.append(len(process.reports))
        save(self, prompt)

    process = start(llama, tmp_path)
    monkeypatch.setattr(disk_tier.PromptSaver, "save_piece", counted)
    process.answer(words(1, 300), tokens=40)
    assert process.folder
    busy = [at for at in pieces if at < len(process.reports)]
    assert busy, "some were written while the row decoded"
    process.write()
    assert process.folder.count > 0


def test_a_prompt_is_taken_over_in_pieces_between_the_steps_of_other_rows(
    llama: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, prompt = start(llama, tmp_path), words(1, 400)
    process.answer(prompt)
    process.stop()
    monkeypatch.setattr(disk_tier, "TAKEN_BYTES", 1)
    engine = start(llama, tmp_path).engine
    engine.handle(Generate(1, "m", words(2, 20), 60, [], GREEDY))
    while not any(isinstance(report, StepOutput) for report in engine.step()):
        pass
    engine.handle(Generate(2, "m", prompt, 8, [], GREEDY))
    engine.step()
    loading = engine._disk._restorer._loading
    assert loading
    wait([loading], 30)
    tokens = 0
    while engine._disk.is_reading(2):
        outputs = [report for report in engine.step() if isinstance(report, StepOutput)]
        tokens += sum(token.row == 1 for output in outputs for token in output.tokens)
    arrays = 2 * SIZES["num_hidden_layers"]
    assert tokens >= arrays - 1, "a token of the other row comes after each array"


def test_a_row_is_admitted_in_the_step_in_which_its_prompt_has_been_read(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    """Later nothing would wake the engine for it."""
    process, prompt = start(llama, tmp_path), words(1, 400)
    process.answer(prompt)
    process.stop()
    engine = start(llama, tmp_path).engine
    engine.handle(Generate(1, "m", prompt, 8, [], GREEDY))
    assert engine._disk.is_reading(1)
    while engine._disk.is_reading(1):
        engine.step()
    assert 1 not in engine._admission.waiting


def test_a_row_that_is_cancelled_while_its_prompt_is_read(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    process = start(llama, tmp_path)
    prompt = words(1, 300)
    process.answer(prompt)
    process.stop()
    after = start(llama, tmp_path)
    after.engine.handle(Generate(77, "m", prompt, 3, [], GREEDY))
    assert after.engine._disk.is_reading(77)
    after.engine.handle(CancelRows([77]))
    after.settle()
    assert after.answer([*prompt, 5]) == start(llama, None).answer([*prompt, 5])
    assert after.cached == 299, "what was read is kept for others"


def test_a_model_that_is_unloaded_while_a_prompt_is_read(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    process = start(llama, tmp_path)
    prompt = words(1, 300)
    process.answer(prompt)
    process.stop()
    after = start(llama, tmp_path)
    after.engine.handle(Generate(77, "m", prompt, 3, [], GREEDY))
    after.engine.handle(UnloadModel("m"))
    deadline = time.monotonic() + 10
    while after.engine._disk.is_reading(77) and time.monotonic() < deadline:
        after.settle()
    after.load()
    after.answer(prompt)
    assert after.cached == 299


def test_prompts_that_the_disk_does_not_have_wait_for_no_file(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    """Short ones have all states of the model after their beginning; one by one, each waited while
    the file of another prompt was read."""
    process = start(llama, tmp_path)
    for seed in range(3):
        process.answer(words(seed, 50))
    process.stop()
    engine = start(llama, tmp_path).engine
    waits = []
    for row in range(8):
        engine.handle(Generate(row, "m", words(100 + row, 50), 2, [], GREEDY))
        waits.append(engine._disk.is_reading(row))
        while engine._disk.is_reading(row):
            engine.step()
    assert waits == [True, *[False] * 7], "only the last used state has to be read, and once"


def test_what_differs_within_the_last_block_comes_back(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    process, prompts = start(llama, tmp_path), [words(seed, 50) for seed in range(3)]
    for prompt in prompts:
        process.answer(prompt)
    process.engine.handle(LimitCache(0))
    process.engine.handle(LimitCache(1 << 30))
    for prompt in prompts:
        process.answer([*prompt[:40], *words(9, 5)])
        assert process.cached == 40


def test_rows_that_wait_for_the_same_prompt_are_admitted_together(
    llama: Path, tmp_path: Path, start: Start
) -> None:
    process, prompt = start(llama, tmp_path), words(1, 200)
    process.answer(prompt)
    process.stop()
    after = start(llama, tmp_path)
    engine = after.engine
    for row in range(6):
        engine.handle(Generate(row, "m", [*prompt, row], 2, [], GREEDY))
    assert len(engine._admission.waiting) == 6
    while engine._disk.is_reading(0):
        after.reports += engine.step()
    assert not engine._admission.waiting
    after.settle()
    assert after.total("hits") == 1
