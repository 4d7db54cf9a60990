"""`mlx-server train`, on a tiny model with random weights."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_server.models.adapter_catalog import AdapterCatalog, AdapterLocation, read_base_shapes
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


def test_an_adapter_that_is_better_is_published(trainings: Trainings) -> None:
    run = trainings.run(*QUICK)
    assert run.returncode == 0, run.stderr
    assert "tiny:abc is in" in run.stdout
    folder = trainings.folder / "adapters" / "abc"
    card = json.loads((folder / "card.json").read_text())
    assert card["loss"]["adapter"]["held_out"] < 0.8 * card["loss"]["base"]["held_out"]
    catalog = AdapterCatalog(
        read_base_shapes(trainings.model, str(trainings.model)), {"abc": AdapterLocation(folder)}
    )
    assert catalog.find("abc").rank == 8
    assert not list(trainings.states())
    again = trainings.run(*QUICK)
    assert again.returncode == 2
    assert "There is an adapter 'abc'" in again.stderr


def test_a_training_that_is_killed_goes_on_to_the_same_bits(trainings: Trainings) -> None:
    killed = trainings.start(*QUICK, "--name", "killed")
    while not list(trainings.states()):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    assert killed.wait() == -9
    assert trainings.run(*QUICK, "--name", "killed").returncode == 0
    whole, continued = trainings.weights("abc"), trainings.weights("killed")
    assert whole.keys() == continued.keys()
    for name in whole:
        assert mx.array_equal(whole[name], continued[name]), name


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
