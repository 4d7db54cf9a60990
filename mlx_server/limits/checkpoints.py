"""Models and adapters, which strangers made."""

from mlx_server.limits.limit import Limit

# Checkpoints

CHECKPOINT_HEADER_BYTES = Limit(
    bounds="the header of one file of weights, as in the safetensors library itself",
    value=100_000_000,
    unit="bytes",
    per="model",
    beyond="the model is unusable",
)
CHECKPOINT_FILES = Limit(
    bounds="files of weights, as there are or as the name of one of them counts",
    value=1000,
    unit="items",
    per="model",
    beyond="the model is unusable",
)
CHECKPOINT_LAYERS = Limit(
    bounds="layers and experts, as a config tells",
    value=10_000,
    unit="items",
    per="model",
    beyond="the model is unusable",
)
NORMALIZER_GROWTH = Limit(
    bounds="times that a tokenizer's normalizer may make a text longer",
    value=1000,
    unit="items",
    per="model",
    beyond="the model is unusable",
)
VOCABULARY_TOKENS = Limit(
    bounds="the largest id of a token",
    value=1 << 24,
    unit="tokens",
    per="model",
    beyond="the model is unusable",
)
REASONING_MARKS = Limit(
    bounds="marks that end reasoning",
    value=64,
    unit="items",
    per="model",
    beyond="the request fails",
)
REASONING_MARK_TOKENS = Limit(
    bounds="such a mark",
    value=256,
    unit="tokens",
    per="model",
    beyond="the request fails",
)
STOP_TOKEN_SETS = Limit(
    bounds="sets of tokens that end answers, of which the engine keeps a matcher",
    value=256,
    unit="items",
    per="server",
    beyond="the longest unused is forgotten",
)
CACHED_PROMPTS = Limit(
    bounds="prompts whose caches are kept for a model and an adapter",
    value=512,
    unit="items",
    per="model",
    beyond="the longest unused is forgotten",
)

# Adapters

ADAPTER_CONFIG_BYTES = Limit(
    bounds="`adapter_config.json`",
    value=1_000_000,
    unit="bytes",
    per="model",
    beyond="the adapter is refused",
)
ADAPTER_HEADER_BYTES = Limit(
    bounds="the header of an adapter's weights",
    value=16_000_000,
    unit="bytes",
    per="model",
    beyond="the adapter is refused",
)
ADAPTER_RANK = Limit(
    bounds="the rank of an adapter",
    value=512,
    unit="items",
    per="model",
    beyond="the adapter is refused",
)
LISTED_ADAPTERS = Limit(
    bounds="what is looked at in the folder of adapters when they are listed",
    value=4096,
    unit="items",
    per="model",
    beyond="the rest is not listed; its adapters are served by their names",
)
ADDED_ADAPTERS = Limit(
    bounds="adapters that clients have loaded and not unloaded",
    value=256,
    unit="items",
    per="model",
    beyond="400 on the route that loads them",
)
