"""Completions of texts and of token ids, as OpenAI's own client sees them."""

from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Completion

from mlx_server.checkpoints.tokenizer import Tokenizer
from tests.live.server import DEMO, SHALLOW

FRANCE = "The capital of France is"


def complete(client: OpenAI, **asked: Any) -> Completion:
    found: Completion = client.completions.create(
        **{"model": SHALLOW, "prompt": FRANCE, "temperature": 0, "max_tokens": 5, **asked}
    )
    return found


@pytest.fixture(scope="module")
def tokenizer(demo_path: Path) -> Tokenizer:
    return Tokenizer(demo_path / "tokenizer.json")


def test_completions_of_all_kinds_of_prompts(client: OpenAI, tokenizer: Tokenizer) -> None:
    expected = complete(client, model=DEMO).choices[0].text
    assert "Paris" in expected
    ids = tokenizer.encode(FRANCE)
    prompts: list[Any] = [[FRANCE], ids, [ids]]
    for prompt in prompts:
        (choice,) = complete(client, model=DEMO, prompt=prompt).choices
        assert choice.text == expected


@pytest.mark.parametrize("as_ids", [True, False])
def test_several_prompts(client: OpenAI, tokenizer: Tokenizer, as_ids: bool) -> None:
    texts = [FRANCE, "One, two, three,"]
    prompt = [tokenizer.encode(text) for text in texts] if as_ids else texts
    found = complete(client, prompt=prompt, n=2)
    alone = [complete(client, prompt=text).choices[0].text for text in texts]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in found.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert found.usage
    assert found.usage.prompt_tokens == sum(len(tokenizer.encode(text)) for text in texts)


def test_echo(client: OpenAI) -> None:
    text = complete(client).choices[0].text
    assert complete(client, echo=True).choices[0].text == FRANCE + text
    assert complete(client, echo=True, max_tokens=0).choices[0].text == FRANCE
    chunks = client.completions.create(
        model=SHALLOW, prompt=FRANCE, temperature=0, max_tokens=5, echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == FRANCE + text


def test_echo_scores_the_prompt_as_generation_did(client: OpenAI, tokenizer: Tokenizer) -> None:
    asked: dict[str, Any] = {"model": DEMO, "echo": True, "logprobs": 1}
    generated = complete(client, **asked).choices[0]
    scored = complete(client, **{**asked, "prompt": generated.text, "max_tokens": 0}).choices[0]
    assert generated.logprobs
    assert scored.logprobs
    assert scored.text == generated.text
    assert scored.logprobs.tokens == generated.logprobs.tokens
    assert scored.logprobs.text_offset == generated.logprobs.text_offset
    one, other = scored.logprobs.token_logprobs, generated.logprobs.token_logprobs
    assert one
    assert other
    assert len(one) == len(tokenizer.encode(generated.text))
    assert [one[0], other[0]] == [None, None]
    assert one[1:] == pytest.approx(other[1:], abs=0.02)


def test_a_stop_string_given_as_such(client: OpenAI) -> None:
    found = complete(client, model=DEMO, stop=" Paris")
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("", "stop")


def test_an_empty_prompt_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as no_prompt:
        complete(client, prompt="")
    assert no_prompt.value.param == "prompt"
