"""How much a model's answers differ from another's, token by token."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import httpx
import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from typer.testing import CliRunner

from mlx_server.cli.compare import ComparisonResult, Request, app, calls_well, parsed_answer
from mlx_server.clients import comparison
from mlx_server.engine.comparison import Answers, ComparisonJob, Divergence, Finding, Side
from mlx_server.errors import ComparisonFailed, Unauthorized
from mlx_server.messages import Tool
from mlx_server.pool.prepare import ModelSpec, prepare
from mlx_server.worker.comparison import compared
from tests.tables import cases

PROMPTS = [list(range(3, 40)), list(range(90, 10, -1)), [7, 9, 11]]


def found(first: Path, second: Path) -> list[Finding]:
    sides = (Side(checkpoint=str(first)), Side(checkpoint=str(second)))
    with TemporaryFile() as file:
        return [*compared(ComparisonJob(sides=sides, prompts=PROMPTS, tokens=12), file)]


def kl(findings: list[Finding]) -> list[float]:
    return [each for f in findings if isinstance(f, Divergence) for each in f.kl]


def with_scaled_layer(model: Path, folder: Path, factor: float) -> Path:
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    weights: dict[str, Any] = mx.load(str(file))  # type: ignore[assignment, unused-ignore]
    name = next(name for name in weights if name.endswith("layers.1.mlp.down_proj.weight"))
    weights[name] = weights[name] * factor
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    return folder


def test_a_model_does_not_differ_from_itself(tiny_path: Path) -> None:
    findings = found(tiny_path, tiny_path)
    one, other = (each for each in findings if isinstance(each, Answers))
    assert kl(findings) == [0.0] * 36
    assert all(all(each.agrees) for each in findings if isinstance(each, Divergence))
    assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


def test_one_layers_scales_that_are_off_by_a_hundredth(tiny_path: Path, tmp_path: Path) -> None:
    findings = found(tiny_path, with_scaled_layer(tiny_path, tmp_path / "off", 1.01))
    one, other = (each for each in findings if isinstance(each, Answers))
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    moved = np.mean([abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True)])
    assert moved > 4 * one.noise


@pytest.mark.parametrize("factor", [1.01, 1.5])
def test_figures_are_those_of_mlx_lm(tiny_path: Path, tmp_path: Path, factor: float) -> None:
    other = with_scaled_layer(tiny_path, tmp_path / "other", factor)
    findings = found(tiny_path, other)
    answers = next(each for each in findings if isinstance(each, Answers))
    expected: list[float] = []
    networks = [mlx_lm.utils.load_model(path)[0] for path in (tiny_path, other)]
    for prompt, answer in zip(PROMPTS, answers.tokens, strict=True):
        ids = mx.array([[*prompt, *answer]])
        a, b = (n(ids)[0, len(prompt) - 1 : -1].astype(mx.float32) for n in networks)
        a, b = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (a, b))
        expected += np.array(mx.sum(mx.exp(a) * (a - b), axis=-1)).tolist()
    assert np.mean(kl(findings)) == pytest.approx(np.mean(expected), rel=0.02, abs=1e-6)


def test_the_command_shows_it_and_its_code_says_whether_it_is_too_much(
    tiny_path: Path, tmp_path: Path
) -> None:
    asked, page = tmp_path / "asked.jsonl", tmp_path / "page.html"
    asked.write_text('{"messages": [{"role": "user", "content": "<b>hi"}]}\n', "utf-8")
    off = with_scaled_layer(tiny_path, tmp_path / "off", 3.0)
    common = ["--requests", str(asked), "--tokens", "8", "--fail-over", "0", "--html", str(page)]
    same = CliRunner().invoke(app, [str(tiny_path), str(tiny_path), *common])
    assert (same.exit_code, "0.000000" in same.output) == (0, True), same.output
    other = CliRunner().invoke(app, [str(tiny_path), str(off), *common])
    assert other.exit_code == 1
    assert "KL divergence" in other.output
    text = page.read_text("utf-8")
    assert "&lt;b&gt;hi" in text
    assert text.count("<rect") == 8


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What another server answers to all that it is asked."""
    answer: dict[str, Any] = {"tokens": [1, 2], "choices": [{"text": "a"}]}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=json.dumps(answer)))
    client = httpx.Client(transport=transport, base_url="http://other")
    monkeypatch.setattr(comparison, "client_of", lambda *_: client)
    return answer


def served() -> list[Finding]:
    sides = [comparison.ServedModel("http://other#model") for _ in "ab"]
    return [*comparison.served_findings(sides, [{"messages": []}], 4)]


ALIKE = {"a": -0.1, "b": -9999}


@cases
def test_a_server_without_log_probabilities_of_prompts_is_named(
    answered: dict[str, Any], logprobs: Any, tops: Any, why: str
) -> None:
    answered["choices"][0]["logprobs"] = {"token_logprobs": logprobs, "top_logprobs": tops}
    with pytest.raises(ComparisonFailed, match=rf"http://other.*{why}"):
        served()


@pytest.mark.parametrize("wrong", [{"choices": []}, {"choices": None}, {"tokens": ["x"]}])
def test_a_server_that_answers_otherwise_is_named(
    answered: dict[str, Any], wrong: dict[str, Any]
) -> None:
    answered.update(wrong)
    with pytest.raises(ComparisonFailed, match=r"http://other.*can't be read"):
        served()


def test_a_server_that_needs_a_key_says_how_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(401))
    client = httpx.Client(transport=transport, base_url="http://other")
    monkeypatch.setattr(comparison, "client_of", lambda *_: client)
    with pytest.raises(Unauthorized, match=r"http://other needs a key: .* http://KEY@host"):
        comparison.ServedModel("http://other")


@cases
def test_a_key_is_sent_only_to_its_server(
    monkeypatch: pytest.MonkeyPatch, named: str, key: str | None
) -> None:
    sent = list[tuple[str, str]]()
    monkeypatch.setenv("MLX_SERVER_API_KEYS", "own,second")
    monkeypatch.setattr(comparison, "client_of", lambda *given: sent.append(given))
    monkeypatch.setattr(comparison, "first_model", lambda _: "m")
    comparison.ServedModel(named)
    ((url, given),) = sent
    assert given == (key or "")
    assert "@" not in url


def test_what_can_not_follow_does_not_end_a_comparison(answered: dict[str, Any]) -> None:
    scores = {"token_logprobs": [None, -1, 0.5, -1], "top_logprobs": [None, *[ALIKE] * 3]}
    answered["choices"][0]["logprobs"] = scores
    assert kl(served()) == [0.0, 0.0]


def test_models_that_answer_nothing_can_not_be_compared() -> None:
    nothing = Divergence([], [])
    with pytest.raises(ComparisonFailed, match="no tokens to compare"):
        ComparisonResult.of([nothing], lambda *_: [])


@cases
def test_a_request_that_can_not_be_compared_is_refused_before_models_are_loaded(
    tmp_path: Path, wrong: dict[str, Any], why: str
) -> None:
    asked = tmp_path / "asked.jsonl"
    line = {"messages": [{"role": "user", "content": "hi"}], **wrong}
    asked.write_text(json.dumps(line), "utf-8")
    run = CliRunner().invoke(app, ["missing/a", "http://b", "--requests", str(asked)])
    assert (why or "Name two models") in f"{run.output} {run.exception}"


@pytest.mark.parametrize(
    ("text", "why"), [("\n", "no requests in it"), ('{"prompt": "a"}\n\nb', "Request 2 of")]
)
def test_a_file_without_requests_or_with_another_line_is_refused(
    tmp_path: Path, text: str, why: str
) -> None:
    (asked := tmp_path / "asked.jsonl").write_text(text, "utf-8")
    run = CliRunner().invoke(app, ["missing/a", "http://b", "--requests", str(asked)])
    assert why in f"{run.output} {run.exception}"


@cases
def test_a_call_is_good_if_its_schema_says_so(
    tiny_path: Path, arguments: str, is_good: bool
) -> None:
    properties = {"n": {"type": "integer"}, "m": {"$ref": "#/nowhere"}}
    schema = {"type": "object", "properties": properties, "required": ["n"]}
    prepared = prepare(ModelSpec(id="tiny", source=str(tiny_path)), lambda *_: None, upcast=False)
    text = f'{{"name": "count", "parameters": {arguments}}}' if arguments else "Nothing."
    asked = Request("", tools=(Tool("count", parameters=schema),))
    answer = parsed_answer(prepared, asked.tools, prepared.checkpoint.tokenizer.encode(text))
    assert calls_well(asked, answer) is is_good
    assert calls_well(Request(""), answer) is None
