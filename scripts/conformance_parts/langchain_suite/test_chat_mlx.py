"""LangChain's standard tests of chat models, run on ChatMLX and a live server."""

import os
from typing import Any

from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from mlx_server.clients.langchain import ChatMLX

MODEL = "langchain-suite"
"""The replay model of served.py that has an answer to each question of the suite."""


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatMLX]:
        return ChatMLX

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL}


class TestBySchema(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatMLX]:
        return ChatMLX

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": os.environ["OPENAI_BASE_URL"], "temperature": 0}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "smollm2-135m"

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}


class TestByCall(TestBySchema):
    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}
