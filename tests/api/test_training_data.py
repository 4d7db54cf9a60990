"""What an adapter may learn, at the bounds."""

import json
from codecs import BOM_UTF8
from io import BytesIO
from pathlib import Path

import pytest

from mlx_server import limits
from mlx_server.api.fine_tuning import FineTuningJob
from mlx_server.api.training_data import samples_of
from mlx_server.engine.training import ADAPTER, Judged, Losses, TrainingJob, TrainingMethod
from mlx_server.errors import TrainingDataInvalid, TrainingFailed
from mlx_server.generation.training import Training
from mlx_server.pool.prepare import ModelSpec, PreparedModel, prepare

LINE = json.dumps({"prompt": "a", "completion": "b"}).encode()


@pytest.fixture(scope="module")
def prepared(tiny_path: Path) -> PreparedModel:
    spec = ModelSpec(id="tiny", source=str(tiny_path))
    return prepare(spec, lambda *progress: None, upcast=False)


def test_the_tokens_of_all_lines(prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = samples_of(prepared, BytesIO(LINE + b"\n" + LINE))
    monkeypatch.setattr(limits, "TRAINING_TOKENS", sum(len(each.tokens) for each in samples))
    assert samples_of(prepared, BytesIO(BOM_UTF8 + LINE + b"\r\n\n" + LINE + b"\n")) == samples
    with pytest.raises(TrainingDataInvalid, match="line 3: All lines may have"):
        samples_of(prepared, BytesIO(b"\n".join([LINE] * 3)))


def test_the_bytes_of_a_line(prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BATCH_LINE_BYTES", len(LINE))
    assert samples_of(prepared, BytesIO(LINE))
    with pytest.raises(TrainingDataInvalid, match="line 1: A line may have"):
        samples_of(prepared, BytesIO(LINE + b"  "))
    with pytest.raises(TrainingDataInvalid, match=r"line 1: A line may have.*line 2: Invalid"):
        samples_of(prepared, BytesIO(LINE * 9 + b"\n{"))


def test_a_line_whose_last_answer_is_not_to_be_learnt(prepared: PreparedModel) -> None:
    def line(*weights: int) -> bytes:
        answers = ({"role": "assistant", "content": "b", "weight": weight} for weight in weights)
        asked = {"role": "user", "content": "a"}
        return json.dumps({"messages": [each for a in answers for each in (asked, a)]}).encode()

    assert samples_of(prepared, BytesIO(line(0, 1)))
    with pytest.raises(TrainingDataInvalid, match="line 1: The last message has the weight 0"):
        samples_of(prepared, BytesIO(line(1, 0)))


def test_what_is_learnt_is_the_last_answer_as_it_is_served(prepared: PreparedModel) -> None:
    (sample,) = samples_of(prepared, BytesIO(LINE))
    raw = prepared.checkpoint.tokenizer.raw
    assert raw([*sample.tokens[: sample.prompt]]).endswith("<|im_start|>assistant\n")
    assert raw([*sample.tokens[sample.prompt :]]) == "b<|im_end|>\n"


def test_the_events_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TRAINING_EVENTS", 2)
    job = FineTuningJob(
        id="ftjob-1",
        created_at=0,
        model="tiny",
        name="a",
        training_file="file-1",
        validation_file=None,
        epochs=1,
        method=TrainingMethod(),
        multiplier=1,
    )
    for message in "abc":
        job.tell(message)
    assert [event["message"] for event in job.events] == ["b", "c"]


@pytest.mark.parametrize(
    ("held_out", "public", "why"),
    [
        (1.9, 3.3, None),
        (2.0, 3.0, "It is not better than its base model"),
        (1.9, 3.301, "It has forgotten too much"),
    ],
)
def test_what_an_adapter_is_published_for(held_out: float, public: float, why: str | None) -> None:
    judged = Judged(1, Losses(2.0, 3.0), Losses(held_out, public))
    training = Training(
        Path(), TrainingJob(checkpoint="", steps=1, steps_per_epoch=1, tokens=1), ""
    )
    training.take(judged)
    assert (training.why_not() or "None").startswith(str(why))


def test_an_adapter_that_is_published_already_is_not_published_twice(tmp_path: Path) -> None:
    """The process may have been killed before it could say so."""
    trained, adapters = tmp_path / "trained", tmp_path / "adapters"
    (trained / ADAPTER).mkdir(parents=True)
    adapters.mkdir()
    job = TrainingJob(checkpoint="", steps=1, steps_per_epoch=1, tokens=1)
    training = Training(trained, job, "data", judged=Judged(1, Losses(2.0, 3.0), Losses(1.0, 3.0)))
    for _ in range(2):
        assert training.publish(adapters, "abc") == adapters / "abc"
    assert [each.name for each in adapters.iterdir()] == ["abc"]
    training.data = "other data"
    with pytest.raises(TrainingFailed, match="'abc' can't be published: there is one"):
        training.publish(adapters, "abc")
    (adapters / "abc" / "card.json").rename(adapters / "abc" / "notes.txt")
    with pytest.raises(TrainingFailed, match="there is one"):
        training.publish(adapters, "abc")
