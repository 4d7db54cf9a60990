"""What mlx-lm loads and transformers renders, we load and render alike, however odd the folder."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from mlx_server.errors import ServerError
from mlx_server.messages import Conversation, Message, Tool
from mlx_server.pool.prepare import ModelSpec, prepare
from mlx_server.worker import weights
from tests.pool.odd_changes import make_odd
from tests.tables import cases

TEXT = "Hi  there"
TOOL: dict[str, Any] = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}

Answer = tuple[list[int], list[int], mx.array]
"""The prompt's tokens, those of the prompt with a tool, and the logits after the first."""


def logits(model: Any, prompt: list[int]) -> mx.array:
    known = [token for token in prompt if token < 320]
    found: mx.array = model(mx.array([known]))[0, -1].astype(mx.float32)
    return found


def of_mlx_lm(folder: Path) -> Answer:
    model, tokenizer = mlx_lm.load(str(folder), lazy=True)
    messages = [{"role": "user", "content": TEXT}]
    tool = {"type": "function", "function": TOOL}
    prompts = (
        tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
        for tools in (None, [tool])
    )
    plain, with_tool = map(list, prompts)
    return plain, with_tool, logits(model, plain)


def of_ours(folder: Path) -> Answer:
    prepared = prepare(ModelSpec("odd", str(folder)), lambda *progress: None, upcast=True)
    # a template alone does not describe tools that it has no place for
    family = replace(prepared.family, tools_in_prompt=False)
    loading = weights.load(prepared.path)
    while True:
        try:
            next(loading)
        except StopIteration as end:
            model = end.value
            break
    plain, with_tool = (
        family.render(prepared.checkpoint, Conversation((Message("user", TEXT),), tools)).tokens
        for tools in ((), (Tool(**TOOL),))
    )
    return plain, with_tool, logits(model, plain)


@pytest.mark.slow
@cases
@pytest.mark.filterwarnings("ignore")  # transformers' and mlx-lm's own
def test_an_odd_folder(
    changes: list[Any],
    says: str,
    differs: str,
    tiny_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`says` is what our refusal says; if empty, it loads. `differs` is why we do other than mlx-lm
    does. Sizes that are huge are refused since mlx-lm multiplies a list by them, and might be given
    the memory of the machine."""
    monkeypatch.setenv("MLX_SERVER_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "odd"
    shutil.copytree(tiny_path, folder)
    make_odd(folder, changes)
    theirs: Answer | Exception
    try:
        theirs = of_mlx_lm(folder)
    except Exception as error:
        theirs = error
    if says:
        with pytest.raises(ServerError) as refused:
            of_ours(folder)
        assert re.search(says, refused.value.message), refused.value.message
        assert isinstance(theirs, Exception) != bool(differs)
        return
    ours = of_ours(folder)
    is_alike = not isinstance(theirs, Exception) and same(ours, theirs)
    assert is_alike != bool(differs), (ours, theirs)


def same(ours: Answer, theirs: Answer) -> bool:
    return ours[:2] == theirs[:2] and bool(mx.allclose(ours[2], theirs[2], atol=1e-3))


@pytest.mark.parametrize("name", ["m[4bit]", "m (1)", "a*b?", "ü 漢", "-m"])
def test_a_folder_by_any_name(name: str, tiny_path: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_path, tmp_path / name)
    assert same(of_ours(tmp_path / name), of_ours(tiny_path))
