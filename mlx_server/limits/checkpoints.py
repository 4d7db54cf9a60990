"""Limits on models and adapters, whose files are untrusted."""

from mlx_server.limits.limit import Limit

# Checkpoints

CHECKPOINT_HEADER_BYTES = Limit(
    bounds="the header of one weights file, as in the safetensors library",
    value=100_000_000,
    unit="bytes",
    per="model",
    beyond="the model is unusable",
)
CHECKPOINT_FILES = Limit(
    bounds="weights files, counted in the folder or in the name of a shard",
    value=1000,
    unit="items",
    per="model",
    beyond="the model is unusable",
)
SMALL_FILES_BYTES = Limit(
    bounds="the files next to the weights that a download fetches and checks first",
    value=512 << 20,
    unit="bytes",
    per="model",
    beyond="the download ends",
)
HUB_LIST_BYTES = Limit(
    bounds="the hub's lists of a repository's files, all pages together",
    value=32 << 20,
    unit="bytes",
    per="model",
    beyond="the download ends",
)
CHECKPOINT_LAYERS = Limit(
    "layers and experts in a config", 2048, "items", "model", beyond="the model is unusable"
)
NORMALIZER_GROWTH = Limit(
    bounds="the factor by which a tokenizer's normalizer may lengthen a text",
    value=1000,
    unit="items",
    per="model",
    beyond="the model is unusable",
)
TOKENIZER_BYTES = Limit(
    bounds="`tokenizer.json`, or the file that it is converted from",
    value=64 << 20,
    unit="bytes",
    per="model",
    beyond="the model is unusable",
)
SMALL_TOKENIZER_BYTES = Limit(
    bounds="a `tokenizer.json` that the server itself reads, which blocks it meanwhile",
    value=1 << 17,
    unit="bytes",
    per="model",
    beyond="a process of its own reads it and makes the ids",
)
TOKENIZER_MEMORY = Limit(
    bounds="memory of that process, and of the one that converts a tokenizer",
    value=2 << 30,
    unit="bytes",
    per="model",
    beyond="the model is unusable",
)
TOKENIZER_SECONDS = Limit(
    bounds="how long that process may take for one reply, or the other for a conversion",
    value=120,
    unit="seconds",
    per="model",
    beyond="503, and the process is killed",
)
DECODER_CHARACTERS = Limit(
    bounds="the decoder of a tokenizer",
    value=1 << 16,
    unit="characters",
    per="model",
    beyond="the model is unusable",
)
VOCABULARY_TOKENS = Limit(
    "the largest token id", 1 << 24, "tokens", "model", beyond="the model is unusable"
)
REASONING_DELIMITERS = Limit(
    "delimiters that end reasoning", 64, "items", "model", beyond="the request fails"
)
REASONING_DELIMITER_TOKENS = Limit(
    "a delimiter that ends reasoning", 256, "tokens", "model", beyond="the request fails"
)
STOP_TOKEN_SETS = Limit(
    bounds="sets of stop tokens for which the engine caches a matcher",
    value=256,
    unit="items",
    per="server",
    beyond="the least recently used is dropped",
)
CACHED_PROMPTS = Limit(
    bounds="prompts in the prompt cache of a model and adapter",
    value=512,
    unit="items",
    per="model",
    beyond="the least recently used is dropped",
)

PROMPT_SNAPSHOTS = Limit(
    bounds="snapshots of a cached prompt's recurrent states and sliding windows",
    value=16,
    unit="items",
    per="request",
    beyond="the one whose neighbours are the nearest is dropped",
)
PROMPTS_AHEAD = Limit(
    bounds="next prompts of conversations to be computed ahead",
    value=16,
    unit="items",
    per="server",
    beyond="the oldest is dropped",
)
AHEAD_TOKENS = Limit(
    bounds="a conversation's next prompt computed ahead, or `compute_ahead`",
    value=4096,
    unit="tokens",
    per="conversation",
    beyond="the rest is computed when it is sent",
)

PROMPT_FILE_BYTES = Limit(
    bounds="the prompt cache's files, as the disk counts them",
    value=20_000_000_000,
    unit="bytes",
    per="server",
    beyond="the least recently used are removed",
    setting="server.prompt_cache.disk",
)

PROMPT_FILES = Limit(
    bounds="files of the prompt cache",
    value=65_536,
    unit="items",
    per="server",
    beyond="the least recently used are removed",
)

PROMPT_WRITE_BYTES = Limit(
    bounds="bytes of prompt caches that wait to be written, copied or after they left the memory "
    "limit; one larger file is allowed",
    value=256 << 20,
    unit="bytes",
    per="server",
    beyond="no more are copied until some are written; of what leaves, of which a 64th of MLX's "
    "memory limit is kept at most, only the beginning is kept",
)

# Adapters

ADAPTER_CONFIG_BYTES = Limit(
    "`adapter_config.json`", 1_000_000, "bytes", "model", beyond="the adapter is refused"
)
ADAPTER_HEADER_BYTES = Limit(
    bounds="the header of an adapter's weights",
    value=16_000_000,
    unit="bytes",
    per="model",
    beyond="the adapter is refused",
)
ADAPTER_RANK = Limit(
    "the rank of an adapter", 512, "items", "model", beyond="the adapter is refused"
)
LISTED_ADAPTERS = Limit(
    bounds="entries of the adapters' folder that are searched for the list of adapters",
    value=4096,
    unit="items",
    per="model",
    beyond="the rest is not listed, but served by name",
)
ADDED_ADAPTERS = Limit(
    bounds="adapters that clients have loaded and not unloaded",
    value=256,
    unit="items",
    per="model",
    beyond="400 on the route that loads them",
)
