"""A question, answers with a leak, and IBM's object at another server."""

from typing import Any

from mlx_server.clients.watsonx import ModelInference
from tests.clients.recorded import Wire

ASKED: list[Wire] = [{"role": "user", "content": "What is the weather?"}]
LEAKED = (
    "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
)


ANSWERED = "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>final<|message|>"


def at(url: str, **more: Any) -> ModelInference:
    credentials = {"url": f"openai+{url}", "api_key": "secret"}
    return ModelInference(model_id="m", credentials=credentials, project_id="p", **more)
