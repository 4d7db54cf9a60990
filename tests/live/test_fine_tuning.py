"""`/v1/fine_tuning/jobs` with OpenAI's SDK: an adapter is trained, published and served."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from mlx_server import limits
from mlx_server.engine.training import ADAPTER_WEIGHTS
from tests.live.fork_server import ran
from tests.live.server import TINY, LiveServer, eventually, serving
from tests.tables import cases

QUICK = {"n_epochs": 4, "learning_rate_multiplier": 100, "layers": -1}
LONG = {**QUICK, "n_epochs": 1000}


def conversation(number: int) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": f"number {number}"},
        {"role": "assistant", "content": "abcde"[number % 3 :]},
    ]
    return {"messages": messages}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_adapters(tmp_path_factory.mktemp("fine-tuning"))


def with_adapters(folder: Path) -> Path:
    (folder / "adapters").mkdir()
    (folder / "played.jsonl").write_text('{"output": "abc"}\n')
    return folder


@pytest.fixture(scope="module")
def config(tiny_path: Path) -> dict[str, Any]:
    models = {
        TINY: {"source": str(tiny_path), "preload": True},
        "written": {"source": "replay:played.jsonl", "family": "llama3"},
    }
    return {"models": models, "server": {"api_keys": ["none", "other"]}}


@pytest.fixture(scope="module")
def server(folder: Path, config: dict[str, Any]) -> Iterator[LiveServer]:
    with serving(folder, config) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def data(client: OpenAI) -> str:
    lines = "".join(json.dumps(conversation(number)) + "\n" for number in range(40))
    return client.files.create(file=("abc.jsonl", lines.encode()), purpose="fine-tune").id


def create(client: OpenAI, file: str, parameters: dict[str, Any], **more: Any) -> Any:
    body: Any = {"hyperparameters": parameters, **more}
    return client.fine_tuning.jobs.create(model=TINY, training_file=file, **body)


def ended(client: OpenAI, id: str) -> Any:
    def has_ended() -> bool:
        return client.fine_tuning.jobs.retrieve(id).finished_at is not None

    eventually(has_ended, "the job has ended", 120)
    return client.fine_tuning.jobs.retrieve(id)


def answer(client: OpenAI, model: str) -> str:
    completion = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "number 3"}],
        max_tokens=8,
        temperature=0,
    )
    return completion.choices[0].message.content or ""


def test_an_adapter_is_trained_and_served_at_once(client: OpenAI, data: str) -> None:
    job = create(client, data, QUICK, suffix="abc", seed=3, metadata={"of": "letters"})
    assert job.status in ("queued", "running")
    job = ended(client, job.id)
    assert (job.status, job.error, job.fine_tuned_model) == ("succeeded", None, f"{TINY}:abc")
    assert job.seed == 3
    assert job.metadata == {"of": "letters"}
    assert job.trained_tokens > 0
    assert answer(client, f"{TINY}:abc") != answer(client, TINY)
    events = client.fine_tuning.jobs.list_events(job.id, limit=2)
    assert events.data[0].message == f"{TINY}:abc is published."
    assert events.has_more
    with pytest.raises(openai.BadRequestError, match="no more"):
        client.fine_tuning.jobs.list_events(job.id, after="ftevent-dropped")
    checkpoints = client.fine_tuning.jobs.checkpoints.list(job.id).data
    newest, *_, oldest = [each.metrics.full_valid_loss or 0 for each in checkpoints]
    assert len(checkpoints) == 4
    assert 0 < newest < oldest
    assert [each.id for each in client.fine_tuning.jobs.list()] == [job.id]
    with pytest.raises(openai.BadRequestError, match="There is an adapter 'abc'"):
        create(client, data, QUICK, suffix="abc")


def test_a_job_that_is_paused_by_answers_is_cancelled_at_once(
    server: LiveServer, client: OpenAI, data: str, folder: Path
) -> None:
    job = create(client, data, LONG, suffix="long")
    jobs = client.fine_tuning.jobs
    with server.openai(api_key="other") as other, pytest.raises(openai.NotFoundError):
        other.fine_tuning.jobs.cancel(job.id)
    eventually(lambda: has_steps(client, job.id), "steps are made", 60)
    assert not any(at.stat().st_mode & 0o077 for at in (folder / "data/training").iterdir())
    with server.http() as http:
        http.headers["authorization"] = "Bearer none"
        gauges = http.get("/metrics").text
        assert "mlx_server_training_steps 9000.0" in gauges
        assert training_of(http)["adapter"] == f"{TINY}:long"
        long = {
            "model": TINY,
            "prompt": ["a"] * 64,
            "guided_regex": "[a-z]{400}",
            "max_tokens": 400,
        }
        with http.stream("POST", "/v1/completions", json={**long, "stream": True}) as stream:
            lines = stream.iter_lines()  # its end would end the stream
            next(lines)
            eventually(lambda: training_of(http)["is_paused"], "the training is paused", 60)
            assert jobs.cancel(job.id).status == "cancelled"
            eventually(lambda: training_of(http) is None, "its process has ended", 60)
            eventually(lambda: not any((folder / "data" / "training").iterdir()), "it is gone", 60)
            assert http.get("/v1/pool").json()["models"][0]["leases"]
    assert ended(client, job.id).fine_tuned_model is None
    with pytest.raises(openai.NotFoundError):
        answer(client, f"{TINY}:long")


def test_jobs_that_wait_end_when_they_are_cancelled_or_lose_their_file(
    client: OpenAI, data: str
) -> None:
    first = create(client, data, LONG)
    lost = client.files.create(file=("lost.jsonl", b"{}"), purpose="fine-tune")
    waiting = create(client, lost.id, QUICK)
    client.files.delete(lost.id)
    for _ in range(limits.TRAINING_JOBS):  # each would take a place
        client.fine_tuning.jobs.cancel(create(client, data, QUICK).id)
    client.fine_tuning.jobs.cancel(first.id)
    job = ended(client, waiting.id)
    assert (job.status, job.error.code) == ("failed", "invalid_training_file")
    assert "deleted" in job.error.message


def test_of_two_jobs_with_one_name_the_second_fails_and_nothing_else(
    client: OpenAI, data: str, folder: Path
) -> None:
    jobs = [create(client, data, QUICK, suffix="twin", seed=seed) for seed in (1, 2)]
    assert [ended(client, job.id).status for job in jobs] == ["succeeded", "failed"]
    error = client.fine_tuning.jobs.retrieve(jobs[1].id).error
    assert error
    assert "'twin' can't be published: there is one" in error.message
    assert not any((folder / "data" / "training").iterdir())


def training_of(http: httpx.Client) -> Any:
    return http.get("/v1/pool").json()["training"]


@pytest.fixture(scope="module")
def _rated(client: OpenAI) -> None:
    for number in range(12):
        rating = "good" if number < 10 else "bad"
        client.chat.completions.create(
            model=TINY,
            messages=[{"role": "user", "content": [{"type": "text", "text": f"number {number}"}]}],
            temperature=0,
            store=True,
            metadata={"rating": rating},
            extra_body={"guided_choice": ["abc", "bcd"]},
        )


@pytest.mark.usefixtures("_rated")
def test_stored_completions_that_were_marked_are_learnt(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no stored chat completion"):
        create(client, "stored:rating=best", QUICK)
    job = create(client, "stored:rating=good", QUICK, suffix="from-stored")
    lines = client.files.content(job.training_file).text.splitlines()
    assert client.files.retrieve(job.training_file).filename == "rating=good.jsonl"
    asked = [json.loads(line)["messages"] for line in lines]
    assert [(one["role"], other["role"]) for one, other in asked] == 10 * [("user", "assistant")]
    assert asked[3][0]["content"][0]["text"] == "number 3"


@pytest.mark.usefixtures("_rated")
def test_the_commands_read_stored_completions_too(client: OpenAI, folder: Path) -> None:
    run = partial(ran, folder=folder, MLX_SERVER_DATA=str(folder / "data"))
    options = ("--layers", "-1", "--learning-rate", "0.0003", "--name", "by-command")
    trained = run("train", TINY, "stored:rating=good", *options)
    assert f"{TINY}:by-command is in" in trained.stdout, trained
    assert answer(client, f"{TINY}:by-command") != answer(client, TINY)
    compared = run("compare", TINY, f"{TINY}:by-command", "--requests", "stored:rating=good")
    assert "10, " in compared.stdout, compared
    assert f"{TINY}:by-command" in compared.stdout


def test_two_servers_are_compared(server: LiveServer, tmp_path: Path) -> None:
    """A server next to itself, its adapter, a model without weights, and one that is none."""
    tools = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}]
    lines = [{"prompt": "number 3", "completion": ""}, {**conversation(4), "tools": tools}]
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps(each) + "\n" for each in lines))
    common = ("--requests", str(asked), "--tokens", "8", "--fail-over", "0")

    def compared(other: str) -> Any:
        arguments = ("compare", f"{server.url}#{TINY}", other, *common)
        return ran(*arguments, folder=tmp_path, MLX_SERVER_API_KEYS="none")

    same = compared(f"{server.url}/v1#{TINY}")
    assert same.returncode == 0, same
    assert "0.000000" in same.stdout
    assert "0 of 1" in same.stdout
    adapter = compared(f"{server.url}#{TINY}:abc")
    assert adapter.returncode == 1
    assert "KL divergence" in adapter.stdout
    for other, why in (
        (f"{server.url}#none", "answers with 404"),
        (TINY, "the URLs of two servers"),
    ):
        refused = compared(other)
        assert refused.returncode != 0
        assert why in " ".join(refused.stderr.replace("│", " ").split()), refused


def has_steps(client: OpenAI, id: str) -> bool:
    return any(each.type == "metrics" for each in client.fine_tuning.jobs.list_events(id))


def test_a_job_goes_on_with_the_next_servers_to_the_same_bits(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    parameters, kills = {**QUICK, "n_epochs": 40, "learning_rate_multiplier": 1}, 2
    folder, seen, job = with_adapters(tmp_path), 0, None
    lines = "".join(json.dumps(conversation(number)) + "\n" for number in range(40))

    def saved() -> int:
        states = (folder / "data" / "training").glob("*/state.safetensors")
        return max((each.stat().st_mtime_ns for each in states), default=0)

    def is_saved() -> bool:
        return saved() > seen

    for _ in range(kills):
        with serving(folder, config) as server, server.openai() as client:
            if job is None:
                file = client.files.create(file=("abc.jsonl", lines.encode()), purpose="fine-tune")
                job = create(client, file.id, parameters, suffix="late", seed=1)
            eventually(is_saved, "a state is saved", 60)
            server.process.kill()
            server.process.wait()
        seen = saved()
    assert job
    with serving(folder, config) as server, server.openai() as client:
        job = ended(client, job.id)
        assert (job.status, job.error) == ("succeeded", None)
        began = list(client.fine_tuning.jobs.list_events(job.id, limit=100))
        assert sum(each.message == "The job has begun." for each in began) <= 1
        whole = create(client, job.training_file, parameters, suffix="whole", seed=1)
        assert ended(client, whole.id).status == "succeeded"
    one, other = (folder / "adapters" / name / ADAPTER_WEIGHTS for name in ("late", "whole"))
    assert one.read_bytes() == other.read_bytes()


@cases
def test_what_can_not_be_trained_is_refused(
    server: LiveServer, data: str, changes: dict[str, Any], status: int, message: str
) -> None:
    body = {"model": TINY, "training_file": data, **changes}
    with server.http() as http:
        http.headers["authorization"] = "Bearer none"
        response = http.post("/v1/fine_tuning/jobs", json=body)
    assert response.status_code == status, response.text
    assert message in response.json()["error"]["message"]


def test_data_that_can_not_be_learnt_fails_the_job_with_its_lines(client: OpenAI) -> None:
    lines = b'{"messages": []}\n[]\n'
    batch = client.files.create(file=("bad.jsonl", lines), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="needs `fine-tune`"):
        create(client, batch.id, QUICK)
    file = client.files.create(file=("bad.jsonl", lines), purpose="fine-tune")
    job = ended(client, create(client, file.id, QUICK, suffix="bad").id)
    assert job.status == "failed"
    assert job.error.code == "invalid_training_file"
    assert "line 1" in job.error.message
    assert "line 2" in job.error.message
