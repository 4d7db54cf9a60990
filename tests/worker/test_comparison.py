"""How much a model's answers differ from another's, token by token."""

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

from mlx_server.cli.compare import Request, app, calls_well, said
from mlx_server.clients import comparison
from mlx_server.engine.comparison import Answers, ComparisonJob, Divergence, Finding, Side
from mlx_server.errors import ComparisonFailed
from mlx_server.messages import Tool
from mlx_server.pool.prepare import ModelSpec, prepare
from mlx_server.worker.comparison import compared

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


def test_a_server_without_log_probabilities_of_prompts_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer: dict[str, Any] = {"tokens": [1, 2], "choices": [{"text": "a", "logprobs": None}]}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
    client = httpx.Client(transport=transport, base_url="http://other")
    monkeypatch.setattr(comparison, "client_of", lambda *_: client)
    sides = [comparison.ServedModel("http://other#model") for _ in "ab"]
    with pytest.raises(ComparisonFailed, match=r"http://other.*no log probabilities of the prompt"):
        [*comparison.served_findings(sides, [{"messages": []}], 4)]
    del answer["choices"]
    with pytest.raises(ComparisonFailed, match="without `choices`"):
        [*comparison.served_findings(sides, [{"messages": []}], 4)]


@pytest.mark.parametrize(
    ("arguments", "is_good"), [('{"n": 1}', True), ('{"n": "x"}', False), ("{", False), ("", False)]
)
def test_a_call_is_good_if_its_schema_says_so(
    tiny_path: Path, arguments: str, is_good: bool
) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    prepared = prepare(ModelSpec(id="tiny", source=str(tiny_path)), lambda *_: None, upcast=False)
    text = f'{{"name": "count", "parameters": {arguments}}}' if arguments else "Nothing."
    asked = Request("", tools=(Tool("count", parameters=schema),))
    answer = said(prepared, asked.tools, prepared.checkpoint.tokenizer.encode(text))
    assert calls_well(asked, answer) is is_good
    assert calls_well(Request(""), answer) is None
