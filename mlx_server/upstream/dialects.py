"""The URLs of each kind of upstream, and the fields that it names differently."""

from collections.abc import Mapping
from typing import Any

from mlx_server.upstream.spec import UpstreamSpec

WATSONX_VERSION = "2025-02-11"

WATSONX_CHAT = "/ml/v1/text/chat_stream"

CHAT, COMPLETIONS, MODELS = "/chat/completions", "/completions", "/models"


def endpoint(spec: UpstreamSpec, route: str) -> str:
    if spec.kind == "watsonx":
        return f"{spec.url}{WATSONX_CHAT}?version={WATSONX_VERSION}"
    return f"{spec.url}{route}"


def body_for(spec: UpstreamSpec, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with the model, and with the field names of this kind of upstream."""
    if spec.kind == "openai":
        return {"model": spec.model, **body, "stream": True}
    owner = {"project_id": spec.project_id} if spec.project_id else {"space_id": spec.space_id}
    found = {"model_id": spec.model, **owner, **body}
    choice = found.pop("tool_choice", None)
    if isinstance(choice, str):  # watsonx has one field for a string and one for an object
        found["tool_choice_option"] = choice
    elif choice is not None:
        found["tool_choice"] = choice
    return found
