"""Fill in the middle at the wire: the requests of editors, as their sources have them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tokenizers import AddedToken, Tokenizer

from mlx_server.api.fields import IGNORED_HEADER
from mlx_server.families.json_families import QWEN3
from tests.api import wire
from tests.api.wire import MODEL, TEXT, Json, ScriptedEngine, error, events, ok

PROMPT = "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>"
LLAMA_VSCODE: Json = {
    "id_slot": 0,
    "input_prefix": "a",
    "input_suffix": "yz",
    "input_extra": [],
    "prompt": "b",
    "n_predict": 100,
    "n_cmpl": 1,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 500,
}
"""The request of an editor that takes this server for llama.cpp's."""
EXTRA = [{"text": "x", "time": 1, "filename": "x.py"}]


@pytest.fixture(scope="module")
def path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("infill") / "tiny"
    shutil.copytree(tiny_path, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [token for token in QWEN3.special_tokens if "fim" in token or "_" in token]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def client(path: Path, engine: ScriptedEngine) -> Iterator[TestClient]:
    with wire.client(path, engine) as client:
        yield client


@pytest.fixture
def prompt(path: Path, engine: ScriptedEngine) -> Iterator[list[str]]:
    """The texts of the prompts that the engine got."""
    engine.taken.clear()
    texts: list[str] = []
    yield texts
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    ends = {tokenizer.token_to_id(token) for token in ("<|fim_prefix|>", "<|file_sep|>")}
    for row in engine.taken:
        text = tokenizer.decode(row.prompt, skip_special_tokens=False)
        assert text in texts
        assert ends <= {*row.stop_tokens} or "<|fim_prefix|>" not in text
    assert engine.taken


def test_a_suffix_of_a_completion(client: TestClient, prompt: list[str]) -> None:
    prompt.append(PROMPT)
    body = {"model": MODEL, "prompt": "ab", "suffix": "yz", "max_tokens": 100, "n": 2}
    assert [
        choice["text"] for choice in ok(client.post("/v1/completions", json=body))["choices"]
    ] == [TEXT] * 2
    for wrong in ({"echo": True}, {"prompt": [1, 2]}):
        assert error(client.post("/v1/completions", json=body | wrong))["param"] in wrong


def test_llama_vscode(client: TestClient, prompt: list[str]) -> None:
    prompt += [
        PROMPT,
        f"<|repo_name|>myproject\n<|file_sep|>x.py\nx\n<|file_sep|>filename\n{PROMPT}",
    ]
    response = client.post("/infill", json=LLAMA_VSCODE)
    one = ok(response)
    facts = {"content": TEXT, "stop": True, "stop_type": "eos", "truncated": False, "index": 0}
    assert one.items() >= facts.items()
    assert one["tokens_evaluated"] == len("abyz") + 3
    assert one["timings"]["predicted_n"] == one["tokens_predicted"]
    ignored = response.headers[IGNORED_HEADER].split(", ")
    assert ignored == ["id_slot", "samplers", "t_max_prompt_ms", "t_max_predict_ms"]
    several = client.post("/infill", json={**LLAMA_VSCODE, "n_cmpl": 3, "input_extra": EXTRA})
    assert [each["content"] for each in several.json()] == [TEXT] * 3
    prepares = {**LLAMA_VSCODE, "n_predict": 0, "samplers": []}
    assert ok(client.post("/infill", json=prepares))["content"] == ""
    cut = ok(client.post("/v1/infill", json={**LLAMA_VSCODE, "n_predict": 2.0, "seed": -1}))
    assert (cut["stop_type"], cut["tokens_predicted"]) == ("limit", 2)


def test_a_stream_of_llama_cpps(client: TestClient) -> None:
    response = client.post("/infill", json={**LLAMA_VSCODE, "stream": True, "n_predict": -1})
    *parts, last = response.text.removesuffix("\n\n").split("\n\n")
    assert "[DONE]" not in last
    assert '"stop":true' in last
    assert len(parts) > 1
    assert all('"stop":false' in part for part in parts)


def test_mistrals_route_which_continue_and_zed_know(client: TestClient, prompt: list[str]) -> None:
    prompt += [PROMPT, "ab"]
    body = {"model": MODEL, "prompt": "ab", "suffix": "yz", "random_seed": 3, "max_tokens": 100}
    (choice,) = ok(client.post("/v1/fim/completions", json=body))["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    chunks = events(client.post("/fim/completions", json=body | {"stream": True}))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == TEXT
    without = body | {"suffix": None}
    (choice,) = ok(client.post("/v1/fim/completions", json=without))["choices"]
    assert choice["finish_reason"] == "stop"
    unlimited = ok(client.post("/v1/fim/completions", json=body | {"max_tokens": -1}))
    assert unlimited["choices"][0]["message"]["content"] == TEXT
    several = client.post("/v1/fim/completions", json=body | {"prompt": ["ab", "c"]})
    assert error(several)["param"] == "prompt"


def test_ollamas_route_which_continue_knows(client: TestClient, prompt: list[str]) -> None:
    prompt += [PROMPT, PROMPT.replace("ab", "")]
    shown = ok(client.post("/api/show", json={"name": MODEL}))
    assert "insert" in shown["capabilities"]
    assert ".Suffix" in shown["template"]
    body = {"model": MODEL, "prompt": "ab", "suffix": "yz", "stream": False, "system": "x"}
    response = client.post("/api/generate", json=body)
    assert ok(response)["response"] == TEXT
    assert response.headers[IGNORED_HEADER] == "system"
    assert ok(client.post("/api/generate", json=body | {"prompt": ""}))["response"] == TEXT


def test_models_say_who_can(client: TestClient, tiny_path: Path, engine: ScriptedEngine) -> None:
    (able,) = ok(client.get("/v1/models"))["data"]
    assert able["capabilities"]["fill_in_the_middle"] is True
    with wire.client(tiny_path, ScriptedEngine()) as other:
        (unable,) = ok(other.get("/v1/models"))["data"]
        assert unable["capabilities"]["fill_in_the_middle"] is False
        refused = error(other.post("/infill", json=LLAMA_VSCODE))
        assert refused["param"] == "suffix"
        assert "fill_in_the_middle" in refused["message"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_extra": [{"filename": "x"}]}, "input_extra[0].text"),
        ({"input_extra": [{"text": "x"}] * 257}, "input_extra"),
        ({"n_predict": "5"}, "n_predict"),
        ({"n_cmpl": 99}, "n_cmpl"),
    ],
)
def test_what_is_wrong_is_named(client: TestClient, asked: Json, param: str) -> None:
    assert error(client.post("/infill", json=LLAMA_VSCODE | asked))["param"] == param
