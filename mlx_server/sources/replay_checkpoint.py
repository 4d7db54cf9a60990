"""Makes the checkpoint folder of a replay model: everything but weights.

Its tokenizer is the family's own or a byte-level one. The latter has 256 bytes and the family's
special tokens as single ids; a family without any gets `END`.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlx_server import __version__
from mlx_server.errors import ModelUnusable, public_message
from mlx_server.families.base import ModelFamily
from mlx_server.models.checkpoint import BUILT_IN_VOCABULARY

FORMAT = 4
"""Increase this whenever the built-in files change, so that those in the cache are made again."""

MODEL_TYPE = "replay"
CONTEXT = 131_072
END = "<|endoftext|>"
GENERATION = json.dumps({"do_sample": False})
"""A recording is certain: to draw from a large vocabulary would only take time."""

Files = dict[str, str]
"""The text of each file, by file name."""

TEMPLATE = """\
{%- for tool in tools or [] %}tool: {{ tool.function | tojson }}
{% endfor %}
{%- for message in messages %}{{ message.role }}
{%- if message.role == "tool" %} {{ message.name }} {{ message.tool_call_id }}{% endif %}: {# #}
{%- if message.reasoning_content %}({{ message.reasoning_content }}) {% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}

call {{ call.id }}: {{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor %}

{% endfor %}{%- if add_generation_prompt %}assistant: {% endif %}"""


def replay_checkpoint(folder: Path, family: ModelFamily) -> Path:
    """Returns a folder that is made once for the same files."""
    made_of = json.dumps([family.name, _inputs(family)], sort_keys=True)
    digest = hashlib.sha256(made_of.encode()).hexdigest()
    checkpoint = folder / f"{family.name}-{digest[:16]}"
    try:
        if not checkpoint.is_dir():
            _write(checkpoint, _built_in(family))
    except OSError as error:
        raise ModelUnusable(
            f"Can't write the replay model to the cache: {public_message(error)}. Make the cache "
            "writable, or set MLX_SERVER_CACHE to another folder."
        ) from None
    return checkpoint


def _write(checkpoint: Path, files: Files) -> None:
    """Writes a temporary folder and renames it, so that no incomplete checkpoint is left."""
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".replay-", dir=checkpoint.parent) as name:
        work = Path(name) / "made"
        work.mkdir()
        for file, text in files.items():
            (work / file).write_text(text, "utf-8")
        try:
            work.rename(checkpoint)
        except OSError:
            if not checkpoint.is_dir():  # else another process has made it from the same files
                raise


def _inputs(family: ModelFamily) -> list[object]:
    """The inputs of the built-in files. To make the files and compare them is slow: gpt-oss's
    vocabulary takes seconds."""
    versions = (FORMAT, __version__, tokenizers.__version__)
    return [*versions, TEMPLATE, CONTEXT, GENERATION, family.stop_tokens, family.special_tokens]


def built_in_tokenizer(family: ModelFamily) -> Tokenizer:
    return family.replay_tokenizer() or _byte_level(family.special_tokens or (END,))


def _built_in(family: ModelFamily) -> Files:
    tokenizer = built_in_tokenizer(family)
    ends = (token for token in family.stop_tokens if tokenizer.token_to_id(token) is not None)
    config = {"chat_template": TEMPLATE, "eos_token": next(ends, END)}
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config),
        "config.json": json.dumps(
            {
                "model_type": MODEL_TYPE,
                "vocab_size": tokenizer.get_vocab_size(),
                "max_position_embeddings": CONTEXT,
                BUILT_IN_VOCABULARY: True,
            }
        ),
        "generation_config.json": GENERATION,
    }


def _byte_level(special: Sequence[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer
