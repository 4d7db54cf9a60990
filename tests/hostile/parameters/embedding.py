"""Of `/v1/embeddings`, and of Ollama's `/api/embed` and `/api/embeddings`."""

from collections.abc import Mapping

from pydantic import BaseModel

from mlx_server.api import embeddings
from mlx_server.api.ollama import input as ollama
from tests.hostile.parameters.case import Shown

LIVE = "tests/live/test_embeddings.py"

PLAIN = f"{LIVE}::test_they_are_those_of_a_plain_computation"
OLLAMAS_CLIENT = f"{LIVE}::test_ollamas_client"

EMBEDDING: Mapping[type[BaseModel], Mapping[str, Shown]] = {
    embeddings.EmbeddingsBody: {
        "model": PLAIN,
        "input": PLAIN,
        "encoding_format": PLAIN,
        "dimensions": f"{LIVE}::test_fewer_dimensions",
        "prompt_name": f"{LIVE}::test_a_prompt_of_the_files",
        "truncate": f"{LIVE}::test_long_inputs_are_refused_or_cut",
    },
    ollama.EmbedBody: dict.fromkeys(ollama.EmbedBody.model_fields, OLLAMAS_CLIENT),
    ollama.OlderEmbedBody: dict.fromkeys(ollama.OlderEmbedBody.model_fields, OLLAMAS_CLIENT),
}
