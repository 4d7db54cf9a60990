"""An agent's session computes each token of its prompts once, on every kind of cache."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from bench_parts.sessions.conversation import SyntheticSession
from bench_parts.sessions.count import Seen, common
from bench_parts.sessions.models import save

from tests.live.common import Models, common_models
from tests.live.server import TINY, LiveServer, eventually, serving

KINDS = ("llama", "gpt_oss", "qwen3_5")
"""All tokens, windows and states: gemma3 and lfm2 have no other kind of cache."""


READ_SECONDS = 60.0
TRIMMED = 8
"""Tokens by which the test's own prompts differ, since the server trims white space."""


AHEAD, USED = "mlx_server_ahead_tokens_total", "mlx_server_used_ahead_tokens_total"


@common_models
def models(folder: Path, _: object) -> Models:
    return {
        f"session-{name}": {"source": str(save(name, folder)), "family": "qwen3"} for name in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_new_message_is_left_for_the_next_turn(
    kind: str, server: LiveServer, demo_path: Path
) -> None:
    """The template drops the answer's thoughts, so that its tokens are not those of the prompt."""
    model = f"session-{kind}"
    seen = Seen(tokenizers.Tokenizer.from_file(str(demo_path / "tokenizer.json")))
    first, second = SyntheticSession(3, rounds=0, answer_words=(30, 30)).requests(2)
    other = {**second, "messages": [*second["messages"][:-1], {"role": "user", "content": "why"}]}
    prompt, following = seen.tokens(first), seen.tokens(second)
    known, end = common(prompt, following), common(following, seen.tokens(other))
    with server.http() as http:

        def ask(body: dict[str, Any]) -> dict[str, Any]:
            answer = http.post("/v1/chat/completions", json={"model": model, **body}).json()
            ends = "length" if body["max_tokens"] == 1 else "stop"
            assert answer["choices"][0]["finish_reason"] == ends, answer
            usage: dict[str, Any] = answer["usage"]
            return usage

        ask(first)
        assert end - known > 32
        new = end - known - TRIMMED
        eventually(lambda: server.counted(AHEAD, model) >= new, "it is computed", READ_SECONDS)
        cached = ask({**second, "max_tokens": 1})["prompt_tokens_details"]["cached_tokens"]
        assert abs(cached - end) <= TRIMMED
        assert server.counted(USED, model) >= new


BILLING = "x-anthropic-billing-header"
SHORT = {"options": {"num_predict": 2}}
RULES = "Answer as briefly as you can, and in the language of the question. " * 3


def asked_with_billing(live: LiveServer, number: int) -> list[dict[str, Any]]:
    """The answers of all endpoints to one request, as Claude Code or a proxy sends it."""
    system = f"{BILLING}: cc_version=2.1.222; cch=0000{number};\n{RULES}"
    question = {"role": "user", "content": f"Question {number}"}
    both = [{"role": "system", "content": system}, question]
    least = {"model": "tiny", "max_tokens": 2}
    bodies = {
        "/v1/chat/completions": {**least, "messages": both},
        "/v1/responses": {
            "model": "tiny",
            "max_output_tokens": 16,
            "instructions": system,
            "input": [question],
        },
        "/v1/messages": {**least, "system": system, "messages": [question]},
        "/generate": {**least, "messages": both},
        "/api/chat": {"model": "tiny", "messages": both, "stream": False, **SHORT},
    }
    with live.http() as http:
        return [http.post(path, json=body).json() for path, body in bodies.items()]


def test_a_volatile_line_is_taken_out_for_everybody(server: LiveServer) -> None:
    first = asked_with_billing(server, 1)
    assert [answer["mlx_server"]["normalized"] for answer in first] == [[BILLING]] * 5
    before = server.counted("mlx_server_cached_prompt_tokens_total")
    asked_with_billing(server, 2)
    found = server.counted("mlx_server_cached_prompt_tokens_total") - before
    assert found > 5 * len(RULES)


def test_no_key_uses_what_another_keys_client_has_asked(tmp_path: Path, tiny_path: Path) -> None:
    """The time to the first token would show what others have asked."""
    config = {"server": {"api_keys": ["a", "b"]}, "models": {TINY: {"source": str(tiny_path)}}}

    def cached(key: str) -> int:
        with live.openai(api_key=key) as client:
            answer = client.completions.create(model=TINY, prompt="Hello " * 50, max_tokens=1)
        assert answer.usage
        assert answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    with serving(tmp_path, config) as live:
        assert [cached(key) > 0 for key in ("a", "a", "b", "b")] == [False, True, False, True]
