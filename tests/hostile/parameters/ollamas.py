"""Of Ollama's `/api/chat`, `/api/generate` and `/api/show`."""

from collections.abc import Mapping

from pydantic import BaseModel

from mlx_server.api.ollama import input as ollama
from tests.hostile.parameters.case import Shown

INPUT = "tests/api/ollama/test_input.py"
WIRE = "tests/api/ollama/test_ollama_wire.py"

CALLS = f"{INPUT}::test_calls_of_earlier_turns"
RESULTS = f"{INPUT}::test_results_answer_the_calls_before_them"
TOOLS = f"{INPUT}::test_tools"
LOADED = f"{WIRE}::test_without_a_prompt_the_model_is_loaded_and_unloaded"
SCORED = f"{WIRE}::test_a_stream_is_the_answer_in_pieces"
PICTURES = "tests/api/test_histories.py::test_a_history_is_answered"

OLLAMAS: Mapping[type[BaseModel], Mapping[str, Shown]] = {
    ollama.Options: {
        "num_predict": f"{WIRE}::test_num_predict",
        "repeat_penalty": f"{WIRE}::test_options_reach_the_sampler",
        "top_k": f"{WIRE}::test_options_reach_the_sampler",
    },
    ollama.AnswerBody: {
        "model": f"{WIRE}::test_no_such_model",
        "stream": SCORED,
        "format": f"{INPUT}::test_a_format_is_held_and_described",
        "keep_alive": LOADED,
        "think": f"{INPUT}::test_thinking_is_an_effort",
        "logprobs": f"{WIRE}::test_log_probabilities",
        "top_logprobs": f"{WIRE}::test_log_probabilities",
    },
    ollama.CalledFunction: {"name": CALLS, "arguments": CALLS},
    ollama.ToolCallParam: {"id": CALLS},
    ollama.OllamaMessageParam: {
        "role": CALLS,
        "content": CALLS,
        "thinking": CALLS,
        "images": PICTURES,
        "tool_name": RESULTS,
        "tool_call_id": RESULTS,
    },
    ollama.OllamaFunctionParam: {"name": TOOLS, "description": TOOLS, "parameters": TOOLS},
    ollama.ToolParam: {"type": TOOLS},
    ollama.OllamaChatBody: {"messages": LOADED},
    ollama.GenerateBody: {
        "prompt": LOADED,
        "system": f"{WIRE}::test_a_system_prompt",
        "raw": f"{WIRE}::test_a_raw_prompt_is_not_rendered",
        "images": PICTURES,
    },
    ollama.ShowBody: {
        "model": f"{WIRE}::test_a_model_is_described",
        "name": f"{WIRE}::test_a_model_is_described",
    },
}
