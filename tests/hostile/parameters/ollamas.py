"""Of Ollama's `/api/chat`, `/api/generate` and `/api/show`."""

from collections.abc import Mapping

from pydantic import BaseModel

from mlx_server.api.ollama import input as ollama
from tests.hostile.parameters.case import Shown

ASKED = "tests/api/test_requests.py::test_a_body_asks_for"
WIRE = "tests/api/ollama/test_ollama_wire.py"

LOADED = f"{WIRE}::test_without_a_prompt_the_model_is_loaded_and_unloaded"
SCORED = f"{WIRE}::test_a_stream_is_the_answer_in_pieces"

OLLAMAS: Mapping[type[BaseModel], Mapping[str, Shown]] = {
    ollama.Options: {
        "num_predict": f"{WIRE}::test_num_predict",
        "repeat_penalty": ASKED,
        "top_k": ASKED,
    },
    ollama.AnswerBody: {
        "model": f"{WIRE}::test_no_such_model",
        "stream": SCORED,
        "format": ASKED,
        "keep_alive": LOADED,
        "think": ASKED,
        "logprobs": f"{WIRE}::test_log_probabilities",
        "top_logprobs": f"{WIRE}::test_log_probabilities",
    },
    ollama.CalledFunction: {"name": ASKED, "arguments": ASKED},
    ollama.ToolCallParam: {"id": ASKED},
    ollama.OllamaMessageParam: {
        "role": ASKED,
        "content": ASKED,
        "thinking": ASKED,
        "images": ASKED,
        "tool_name": ASKED,
        "tool_call_id": ASKED,
    },
    ollama.OllamaFunctionParam: {"name": ASKED, "description": ASKED, "parameters": ASKED},
    ollama.ToolParam: {"type": ASKED},
    ollama.OllamaChatBody: {"messages": LOADED},
    ollama.GenerateBody: {
        "prompt": LOADED,
        "system": ASKED,
        "raw": f"{WIRE}::test_a_raw_prompt_is_not_rendered",
        "images": ASKED,
    },
    ollama.ShowBody: {
        "model": f"{WIRE}::test_a_model_is_described",
        "name": f"{WIRE}::test_a_model_is_described",
    },
}
