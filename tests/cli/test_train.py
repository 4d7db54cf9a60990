"""`mlx-server train`, on a tiny model with random weights."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import psutil
import pytest

from mlx_server.models.adapter_catalog import AdapterCatalog, AdapterLocation, read_base_shapes
from mlx_server.system.process import NICENESS
from mlx_server.worker.trainer import alone_in
from tests.live.fork_server import ran
from tests.tiny import tiny_llama

ANSWERS = ("abc", "bcd", "cde", "def", "efg")


def conversation(number: int) -> dict[str, object]:
    return {
        "messages": [
            {"role": "user", "content": f"number {number}"},
            {"role": "assistant", "content": ANSWERS[number % len(ANSWERS)]},
        ]
    }


class Trainings:
    """Runs the command in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = tiny_llama(folder / "tiny")
        self.lines = [json.dumps(conversation(number)) for number in range(40)]
        (folder / "models.yaml").write_text(f"models: {{tiny: {{source: {self.model}}}}}\n")

    def start(self, *options: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "mlx_server", *self._arguments(*options)]
        nothing = subprocess.DEVNULL
        return subprocess.Popen(command, cwd=self.folder, stdout=nothing, stderr=nothing)

    def run(self, *options: str) -> "subprocess.CompletedProcess[str]":
        return ran(*self._arguments(*options), folder=self.folder, seconds=600)

    def _arguments(self, *options: str) -> list[str]:
        (self.folder / "abc.jsonl").write_text("\n".join(self.lines) + "\n")
        return ["train", "tiny", "abc.jsonl", *options]

    def states(self) -> Iterator[Path]:
        return (self.folder / "data" / "training").glob("*/state.safetensors")

    def saved(self) -> set[int]:
        return {each.stat().st_mtime_ns for each in self.states()}

    def weights(self, name: str) -> dict[str, mx.array]:
        found = mx.load(str(self.folder / "adapters" / name / "adapters.safetensors"))
        assert isinstance(found, dict)
        return found


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    folder = tmp_path_factory.mktemp("trainings")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLX_SERVER_DATA", str(folder / "data"))
        yield Trainings(folder)


QUICK = ("--learning-rate", "0.01", "--layers", "-1", "--epochs", "4")


@pytest.mark.parametrize(("kind", "name"), [("lora", "abc"), ("dora", "with-dora")])
def test_an_adapter_that_is_better_is_published(trainings: Trainings, kind: str, name: str) -> None:
    run = trainings.run(*QUICK, "--kind", kind, "--name", name)
    assert run.returncode == 0, run.stderr
    assert f"tiny:{name} is in" in run.stdout
    folder = trainings.folder / "adapters" / name
    card = json.loads((folder / "card.json").read_text())
    assert card["loss"]["adapter"]["held_out"] < 0.8 * card["loss"]["base"]["held_out"]
    assert card["loss"]["adapter"]["public"] > 0
    locations = {name: AdapterLocation(folder)}
    catalog = AdapterCatalog(read_base_shapes(trainings.model, str(trainings.model)), locations)
    assert (catalog.find(name).rank, catalog.find(name).kind) == (8, kind)
    assert not list(trainings.states())


def test_a_name_that_is_taken_is_refused_until_its_adapter_is_dropped(trainings: Trainings) -> None:
    again = trainings.run(*QUICK)
    assert again.returncode == 2
    assert "There is an adapter 'abc'" in again.stderr
    drop = [sys.executable, "-m", "mlx_server", "adapters", "--drop"]
    assert subprocess.run([*drop, "with-dora"], cwd=trainings.folder).returncode == 0
    assert os.listdir(trainings.folder / "adapters") == ["abc"]
    assert subprocess.run([*drop, "with-dora"], cwd=trainings.folder).returncode == 2


def trainers(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    found = list[psutil.Process]()
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.ZombieProcess):  # another one that has just ended
            found += [child] if "mlx_server.worker.trainer" in child.cmdline() else []
    return found


def test_a_training_that_is_killed_goes_on_to_the_same_bits(trainings: Trainings) -> None:
    whole, killed, kills = "whole", "killed", 2
    options = (*QUICK, "--epochs", "6", "--learning-rate", "0.00001", "--name")
    assert trainings.run(*options, whole).returncode == 0
    seen = set[int]()
    for kill in range(kills):
        process = trainings.start(*options, killed)
        while trainings.saved() <= seen:
            assert process.poll() is None
            time.sleep(0.01)
        (trainer,) = trainers(process)
        for each in (process, trainer) if kill % 2 else (trainer, process):
            each.kill()
        process.wait()
        seen = trainings.saved()
    assert trainings.run(*options, killed).returncode == 0
    one, other = trainings.weights(whole), trainings.weights(killed)
    assert one.keys() == other.keys()
    for name in one:
        assert mx.array_equal(one[name], other[name]), name


def test_the_trainer_of_a_killed_command_keeps_its_folder_to_its_end(trainings: Trainings) -> None:
    options = (*QUICK, "--name", "left")
    process = trainings.start(*options)
    while not (children := trainers(process)) or not list(trainings.states()):
        assert process.poll() is None
        time.sleep(0.01)
    (state,), (left,) = trainings.states(), children
    left.suspend()
    assert sys.platform != "linux" or left.nice() == NICENESS
    process.kill()
    process.wait()
    with pytest.raises(RuntimeError, match=f"process {left.pid} trains"), alone_in(state.parent, 0):
        pass
    left.resume()
    assert trainings.run(*options).returncode == 0


def test_what_can_not_be_trained_is_refused(trainings: Trainings) -> None:
    others = "written: {source: 'replay:written.jsonl'}, there: {source: 'openai+http://x/v1'}"
    (trainings.folder / "others.yaml").write_text(f"models: {{{others}}}\n")
    for wrong, code, message in (
        (("--epochs", "9" * 20), 2, "less than or equal to 1000"),
        (("--learning-rate", "inf"), 2, "less than or equal to"),
        (("--layers", "9" * 30), 2, "less than or equal to"),
    ):
        run = trainings.run(*wrong)
        assert (run.returncode, message in run.stderr) == (code, True), run.stderr
    for model in ("written", "there"):
        arguments = ("train", model, "abc.jsonl", "--config", "others.yaml", "--name", "no")
        run = ran(*arguments, folder=trainings.folder, seconds=60)
        assert run.returncode == 1
        assert f"{model} can't be trained: name a model with weights" in run.stderr


def test_a_loss_that_is_no_number_ends_the_training(trainings: Trainings) -> None:
    run = trainings.run(*QUICK, "--learning-rate", "1e30", "--name", "wild")
    assert run.returncode == 1
    assert "is no number; a lower learning rate may help" in " ".join(run.stderr.split())


def test_an_adapter_that_is_not_better_is_not_published(trainings: Trainings) -> None:
    run = trainings.run("--epochs", "1", "--learning-rate", "0", "--name", "idle")
    assert run.returncode == 1
    assert "It is not better than its base model" in run.stdout
    assert not (trainings.folder / "adapters" / "idle").exists()


BAD_LINES = (
    ("{", "Invalid JSON"),
    ("[]", "not a JSON object"),
    ('{"text": "a"}', "Send"),
    ('{"messages": 1}', "messages"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "should be the assistant's"),
    (json.dumps({"prompt": "a" * 4000, "completion": "b"}), "Shorten it"),
)


def test_each_line_that_can_not_be_learnt_is_named(trainings: Trainings) -> None:
    lines = trainings.lines
    trainings.lines = [*lines, *(line for line, _ in BAD_LINES)]
    try:
        run = trainings.run("--name", "bad")
    finally:
        trainings.lines = lines
    assert run.returncode == 1
    _, *mistakes = re.split(r"line \d+: ", " ".join(run.stderr.split()))
    for mistake, (_, message) in zip(mistakes, BAD_LINES, strict=True):
        assert message in mistake
