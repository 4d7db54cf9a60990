"""An agent's session computes each token of its prompts once, on every kind of cache."""

from pathlib import Path

import pytest
from bench_parts.sessions.count import Interruption, counted

from tests.live.server import serving


@pytest.mark.parametrize("scenario", ["two agents", "two chats"])
@pytest.mark.parametrize("model", ["gpt_oss", "qwen3_5"])
def test_two_sessions_with_one_system_prompt(model: str, scenario: str) -> None:
    count = counted(model, scenario, "mlx-server", turns=2)
    assert count.prompt_tokens > 6_000
    assert count.again <= 0.02 * count.prompt_tokens


@pytest.mark.parametrize("interruption", ["restart", "swap"])
@pytest.mark.parametrize("model", ["llama", "gpt_oss", "qwen3_5"])
def test_what_a_restart_or_another_model_costs(model: str, interruption: Interruption) -> None:
    count = counted(model, "one agent", "mlx-server", turns=2, interruption=interruption)
    assert count.prompt_tokens > 6_000
    assert count.again <= 0.03 * count.prompt_tokens


def test_no_key_uses_what_another_keys_client_has_asked(tmp_path: Path, tiny_path: Path) -> None:
    """The time to the first token would show what others have asked."""
    server = {"api_keys": ["a", "b"]}
    models = {"tiny": {"source": str(tiny_path)}}

    def cached(key: str) -> int:
        with live.openai(api_key=key) as client:
            answer = client.completions.create(model="tiny", prompt="Hello " * 50, max_tokens=1)
        assert answer.usage
        assert answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    with serving(tmp_path, {"server": server, "models": models}) as live:
        assert [cached(key) > 0 for key in ("a", "a", "b", "b")] == [False, True, False, True]
