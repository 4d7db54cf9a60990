"""Everything in a checkpoint's folder except the weights, how it makes embeddings by its
sentence-transformers files, and whether mlx-lm can make the model.

The small files add tokens to tokenizer.json: most folders list them in tokenizer_config.json, as
`added_tokens_decoder`. In older ones special_tokens_map.json names them, and added_tokens.json has
those of a fine-tune."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard, cast

from tokenizers import AddedToken

from mlx_server import limits
from mlx_server.engine.messages import Pooling
from mlx_server.errors import ModelUnusable, public_message
from mlx_server.models.architectures import (
    CONTEXT,
    context_of,
    is_encoder,
    is_reranker,
    texts,
    why_unknown,
)
from mlx_server.models.files import (
    existing,
    is_own,
    read_json,
    read_optional_json,
    read_own,
    tensor_names,
)
from mlx_server.models.tokenizer import Tokenizer, read_tokenizer
from mlx_server.models.vision import FAMILIES as VISION_FAMILIES
from mlx_server.requests import SamplingChoices
from mlx_server.system.sandbox.chat_template import ChatTemplate

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of chat templates in checkpoints with several."""

FILES = {
    DEFAULT: ("chat_template.jinja", f"additional_chat_templates/{DEFAULT}.jinja"),
    WITH_TOOLS: (f"additional_chat_templates/{WITH_TOOLS}.jinja",),
}
OF_PROCESSORS = ("chat_template.json", "processor_config.json")


def read_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The templates that are used, by name; most checkpoints have only a default one. Raises
    ModelUnusable.

    As in transformers, files go before configs. Beyond it, chat_template.json and
    processor_config.json are read, which it reads for images only, and a single template is the
    default whatever its name.
    """
    templates = {name: text for name in FILES if (text := _of_files(folder, name))}
    if DEFAULT not in templates:
        configs = (read_optional_json(folder / name) for name in OF_PROCESSORS)
        named = next(filter(None, map(_named, (tokenizer_config, *configs))), {})
        templates = {**named, **templates}
    if DEFAULT not in templates and len(templates) == 1:
        templates[DEFAULT] = next(iter(templates.values()))
    return {name: text for name, text in templates.items() if name in FILES}


def _of_files(folder: Path, name: str) -> str:
    paths = [folder / file for file in FILES[name]]
    written = [path for path in paths if path.is_file() and path.stat().st_size]
    return _text(written[-1]) if written else ""


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    """The `chat_template` of a config: a text, an object of texts by name, or a list of entries
    with a `name` and a `template`."""
    match config.get("chat_template"):
        case str(text):
            named: dict[Any, Any] = {DEFAULT: text}
        case dict(named):
            pass
        case list(entries):
            listed = [entry for entry in entries if isinstance(entry, dict)]
            named = {str(it["name"]): it.get("template") for it in listed if "name" in it}
        case _:
            return {}
    return {name: text for name, text in named.items() if isinstance(text, str) and text}


def _text(path: Path) -> str:
    try:
        text = read_own(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelUnusable(f"{path.name} can't be read: {public_message(error)}.") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


log = logging.getLogger("mlx_server.families")

# How it makes embeddings

MODULES, POOLING = "modules.json", "1_Pooling/config.json"
PROMPTS, LENGTH = "config_sentence_transformers.json", "sentence_bert_config.json"

UNDERSTOOD = {"Transformer", "Pooling", "Normalize"}

POOLINGS: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
"""The poolings that a causal model can do, by their names in the files."""

OF_ENCODERS: Mapping[str, Pooling] = {**POOLINGS, "cls": "cls", "cls_token": "cls"}
"""The poolings of encoders. A causal model can't use its first token, which sees no other."""


NO_POOLING = (
    "the model's files do not say how its embeddings are pooled: using the mean of all tokens. Add "
    "modules.json and 1_Pooling/config.json of the original model if that is wrong."
)


@dataclass(frozen=True)
class Embedder:
    width: int
    """The number of values of a hidden state; 0 if config.json does not say so."""
    pooling: Pooling = "last"
    normalizes: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that are put before an input, by name."""
    default_prompt: str | None = None
    """The name of the prompt of inputs that name none."""
    max_tokens: int | None = None
    """The longest input that it was trained for; None: its context."""
    ends_with_end_token: bool = False
    """Whether the end-of-sequence token follows each input even if tokenizer.json does not say so.
    """
    unsupported: str = ""
    """The feature of the files that is not supported here; empty if all are."""


def read_embedder(path: Path, config: Mapping[str, Any], *, adds_end: bool) -> Embedder | None:
    """Returns None for a checkpoint without sentence-transformers files that pool, unless it is an
    encoder, which can do nothing else.

    adds_end: the tokenizer's `add_eos_token`. Raises ModelUnusable.
    """
    listed = _json(path, MODULES, [])
    entries = [entry for entry in listed if isinstance(entry, dict)]
    modules = [str(entry.get("type")).rpartition(".")[2] for entry in entries]
    if "Pooling" not in modules:
        return _mean_of(config) if is_encoder(config) and not is_reranker(config) else None
    pooling, unknown = _pooling(_json(path, POOLING, {}), config)
    prompts = _json(path, PROMPTS, {})
    named, default = prompts.get("prompts"), prompts.get("default_prompt_name")
    texts_by_name = named.items() if isinstance(named, dict) else ()
    others = [f"the module {name[:100]}" for name in modules if name not in UNDERSTOOD]
    longest = _json(path, LENGTH, {}).get("max_seq_length")
    return Embedder(
        width=width_of(config),
        pooling=pooling,
        normalizes="Normalize" in modules,
        prompts={name: text for name, text in texts_by_name if isinstance(text, str)},
        default_prompt=default if isinstance(default, str) else None,
        max_tokens=longest if type(longest) is int and longest > 0 else None,
        ends_with_end_token=adds_end,
        unsupported=", ".join(filter(None, (*others, unknown, _attention(config)))),
    )


def width_of(config: Mapping[str, Any]) -> int:
    widths = (part.get("hidden_size") for part in texts(config))
    return next((width for width in widths if type(width) is int), 0)


def _mean_of(config: Mapping[str, Any]) -> Embedder:
    """The mean, as sentence-transformers takes it for such files, normalised as most files ask
    for."""
    log.warning(NO_POOLING)
    return Embedder(width=width_of(config), pooling="mean")


def _pooling(config: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[Pooling, str]:
    """Returns the pooling, and what can't be done. A copy that lacks the file, as mlx-lm's
    conversions do, pools the last token, as vLLM does with a causal model."""
    if is_encoder(model) and not config:
        log.warning(NO_POOLING)
        return "mean", ""
    known = OF_ENCODERS if is_encoder(model) else POOLINGS
    flags = [name.removeprefix("pooling_mode_") for name, is_on in config.items() if is_on is True]
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else [f for f in flags if f != "include_prompt"]
    if config and (len(modes) != 1 or modes[0] not in known):
        return "last", f"pooling by {'+'.join(modes)[:100] or 'no known mode'}"
    pooling = known[modes[0]] if modes else "last"
    if pooling == "mean" and config.get("include_prompt") is False:
        return pooling, "pooling without the prompt"
    return pooling, ""


def _attention(config: Mapping[str, Any]) -> str:
    """mlx-lm's models are causal: each token sees those before it."""
    if is_encoder(config):
        return ""
    is_causal = config.get("is_causal") is not False and not config.get(
        "use_bidirectional_attention"
    )
    return "" if is_causal else "bidirectional attention"


def _json(folder: Path, name: str, missing: Any) -> Any:
    """The file's content, of the type of `missing`, which is returned if there is no file."""
    path = folder / name
    if not path.is_file() or not is_own(path, folder):
        return missing
    try:
        data = json.loads(read_own(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnusable(f"{name} can't be read: {public_message(error)}.") from None
    if not isinstance(data, type(missing)):
        kind = "array" if isinstance(missing, list) else "object"
        raise ModelUnusable(f"{name} must contain a JSON {kind}.")
    return data


# All of it

FALLBACK_CONTEXT = 131_072
"""Context length of a model whose own is unknown. If it is too high, answers get worse after the
model's own length; if it were too low, valid prompts would be refused."""

MOST_STRETCHED = 1024
"""Upper bound on YaRN's factor: a file with a larger one is damaged."""

DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

SENSIBLE: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: 0 <= value <= 1_000_000 and value == int(value),
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value <= 10,
}
"""Ranges of generation_config.json's recommendations: those of requests, where top_p may be 0 too,
which transformers refuses."""


BUILT_IN_VOCABULARY = "built_in_vocabulary"
"""Set in the config.json of replay models for which this server wrote all files."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    config: dict[str, Any]
    model_type: str
    context_length: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    tokens: dict[str, str]
    """Special tokens that templates use, by name: `bos_token`, `eos_token` and others."""
    end_tokens: frozenset[int]
    """End-of-sequence ids of config.json, generation_config.json and the tokenizer."""
    sampling: SamplingChoices
    """The publisher's recommended sampling parameters."""
    tool_template: ChatTemplate | None = None
    """Template for requests with tools; only older checkpoints have a separate one."""
    embedder: Embedder | None = None
    """The way in which it makes embeddings, if its files say so."""

    @property
    def has_built_in_vocabulary(self) -> bool:
        """Whether this server wrote the vocabulary, for a replay model."""
        return self.model_type == "replay" and self.config.get(BUILT_IN_VOCABULARY) is True

    @cached_property
    def unused_heads(self) -> int:
        """The layers in the weights that predict further tokens (MTP), which mlx-lm leaves out."""
        promised = [
            (part.get("num_hidden_layers", 0), count)
            for part in texts(self.config)
            for name, count in part.items()
            if "layers" in name and any(each in name for each in HEADS)
            if _is_count(count) and 0 < count <= MOST_HEADS
        ]
        if not promised:
            return 0
        (layers, count), *_ = promised
        after = {f".layers.{layers + at}." for at in range(count)} if _is_count(layers) else ()
        with suppress(ModelUnusable):
            for name in tensor_names(self.path):
                if MTP.search(name) or any(each in name for each in after):
                    return count
        return 0

    @property
    def template_source(self) -> str:
        """The source of all templates, in which the families look for their markers."""
        return "".join(t.source for t in (self.template, self.tool_template) if t)

    @property
    def quantization(self) -> str | None:
        """What the weights are stored in: `4bit`, `mxfp4` or `bf16`; None if that is unknown."""
        for name in ("quantization", "quantization_config"):
            if isinstance(entry := self.config.get(name), dict):
                return _quantization(entry)
        dtypes = (self.config.get(name) for name in ("dtype", "torch_dtype"))
        return next(
            (DTYPES[each] for each in dtypes if isinstance(each, str) and each in DTYPES), None
        )


def _quantization(entry: Mapping[str, Any]) -> str | None:
    """Read from mlx-lm's `mode` and `bits`, or from the `quant_method` of other libraries."""
    mode, bits = entry.get("mode", "affine"), entry.get("bits")
    if mode == "affine" and _is_count(bits):
        return f"{bits}bit"
    name = entry.get("quant_method") if mode == "affine" else mode
    return name[:32] if isinstance(name, str) else None


def read_checkpoint(
    path: Path, chat_template: str | None = None, tokenizer_json: Path | None = None
) -> Checkpoint:
    """`chat_template` and `tokenizer_json` replace the checkpoint's own. Raises ModelUnusable."""
    config = read_json(path / "config.json")
    generation = read_optional_json(path / "generation_config.json")
    tokenizer_config = read_optional_json(path / "tokenizer_config.json")
    tokenizer = read_tokenizer(existing(tokenizer_json or path / "tokenizer.json"))
    tokens = read_special_tokens(path, tokenizer_config).texts
    own = {DEFAULT: chat_template} if chat_template else read_chat_templates(path, tokenizer_config)
    model_type = config.get("model_type")
    if DEFAULT not in own and (family := VISION_FAMILIES.get(str(model_type))) and family.template:
        own[DEFAULT] = family.template
    templates = {name: ChatTemplate(text) for name, text in own.items()}
    return Checkpoint(
        path=path,
        config=config,
        model_type=model_type if isinstance(model_type, str) else "",
        context_length=_context_length(config),
        tokenizer=tokenizer,
        template=templates.get(DEFAULT),
        tool_template=templates.get(WITH_TOOLS),
        tokens=tokens,
        end_tokens=_end_tokens((config, generation), tokens, tokenizer),
        sampling=_sampling(generation),
        embedder=read_embedder(
            path, config, adds_end=tokenizer_config.get("add_eos_token") is True
        ),
    )


def _context_length(config: dict[str, Any]) -> int:
    """The context length of config.json, else a high guess."""
    if is_encoder(config):
        return context_of(config)
    own = [n for part in texts(config) for n in _contexts(part)]
    if own:
        return own[0]
    log.warning(
        "config.json does not give the model's context length: using %d tokens, a guess. If that "
        "is wrong, set `context_length` in models.yaml.",
        FALLBACK_CONTEXT,
    )
    return FALLBACK_CONTEXT


def _contexts(config: Mapping[str, Any]) -> Iterator[int]:
    stretched = max(map(_yarn_factor, (config.get("rope_scaling"), config.get("rope_parameters"))))
    for name in CONTEXT:
        count = config.get(name)
        if _is_count(count) and count > 0:
            yield max(count, stretched)
    if stretched:
        yield stretched


def _yarn_factor(rope: Any) -> int:
    """The context length with YaRN, which users enable without changing the original length."""
    if not isinstance(rope, dict) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return 0
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if not _is_count(original) or not isinstance(factor, int | float):
        return 0
    return int(original * factor) if 1 <= factor <= MOST_STRETCHED else 0


def _end_tokens(
    configs: Iterable[dict[str, Any]], tokens: dict[str, str], tokenizer: Tokenizer
) -> frozenset[int]:
    named = [tokenizer.id_of(tokens["eos_token"])] if "eos_token" in tokens else []
    ids = (config.get("eos_token_id") for config in configs)
    listed = [id for entry in ids for id in (entry if isinstance(entry, list) else [entry])]
    return frozenset(token for token in [*named, *listed] if _is_count(token))


def _is_count(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, and one that a message to the engine can have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


def _sampling(generation: dict[str, Any]) -> SamplingChoices:
    stated = {name: v for name in SENSIBLE if (v := generation.get(name)) is not None}
    settings = {name: value for name, value in stated.items() if _is_sensible(name, value)}
    for name in stated.keys() - settings.keys():
        log.warning("generation_config.json: ignored the invalid %s %.50r", name, stated[name])
    if "top_k" in settings:
        settings["top_k"] = int(settings["top_k"])
    if generation.get("do_sample") is False:
        settings["temperature"] = 0.0
    return cast(SamplingChoices, settings)


def _is_sensible(name: str, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and SENSIBLE[name](cast(float, value))


HEADS = ("mtp", "nextn")
"""Parts of the names of settings for the number of layers that predict further tokens."""
MTP = re.compile(r"(?:^|\.)mtp\b")
MOST_HEADS = 16

# Whether mlx-lm can make the model

NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")
LAYERS = re.compile("(layer|block)s?$")
MORE_LAYERS = 128
"""The number of layers that a config may have in excess of the weights: its vision tower may have
been left out, or layers may share their weights."""

COUNT = re.compile("(layer|expert|block|loop)s?$")
"""Names of settings that are numbers of layers, or of parts of them."""

KINDS = re.compile("(types?|_pattern)$")
"""Names of settings that may list what kind each layer is of."""


def check_architecture(config: dict[str, Any], name: str) -> None:
    if why := why_unknown(config):
        raise ModelUnusable(f"{name} can't be used: {why}")
    for key, count in _counts(config):
        if count > limits.CHECKPOINT_LAYERS:
            raise ModelUnusable(
                f"config.json: {key[-60:]} is {str(count)[:20]}; the limit is "
                f"{limits.CHECKPOINT_LAYERS}. Download the model again."
            )


def check_layer_count(config: dict[str, Any], folder: Path) -> None:
    """Raises ModelUnusable if config.json promises far more layers than the weights have: to make
    each takes the engine milliseconds, in which it computes nothing else."""
    promised = [it for it in _counts(config) if LAYERS.search(it[0]) and it[1] > MORE_LAYERS]
    if not promised:
        return
    key, count = max(promised, key=lambda it: it[1])
    layers = len({number for name in tensor_names(folder) for number in NUMBER.findall(name)})
    if count > layers + MORE_LAYERS:
        raise ModelUnusable(
            f"config.json: {key[-60:]} is {count}, but the weights have {layers} layers. Download "
            "the model again."
        )


def _counts(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The settings that decide how many layers mlx-lm makes, in nested configs too."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _counts(value)
        elif isinstance(value, list | str) and KINDS.search(key):
            yield key, len(value)
        if COUNT.search(key):
            each = value if isinstance(value, list) else [value]
            yield from ((key, count) for count in each if type(count) is int)


MAP, ADDED = "special_tokens_map.json", "added_tokens.json"

STANDARD = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
EXTRA, ADDITIONAL = "extra_special_tokens", "additional_special_tokens"
"""Keys of further special tokens, in a list or by names of their own; the second is the older."""

TOKEN_ID, SURROGATE = re.compile(r"[0-9]{1,9}"), re.compile(r"[\ud800-\udfff]")

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class SpecialTokens:
    named: Mapping[str, AddedToken]
    """By the names under which chat templates know them, such as `bos_token`."""
    further: tuple[AddedToken, ...]
    listed: Mapping[int, AddedToken]
    """By numbers that give their order: a tokenizer gives each its next free id."""
    is_legacy: bool = False
    """Whether the flags in tokenizer.json count rather than the listed ones."""

    @property
    def texts(self) -> dict[str, str]:
        return {name: token.content for name, token in self.named.items()}

    def missing_from(self, own: Mapping[int, AddedToken]) -> list[AddedToken]:
        """Those that a tokenizer with these added tokens lacks, or has with other flags."""
        by_id = {**self.listed, **own} if self.is_legacy else self.listed
        listed = [by_id[id] for id in sorted(by_id)]
        present = {token.content for token in (*listed, *own.values())}
        others = {
            token.content: token
            for token in (*self.named.values(), *self.further)
            if token.content not in present
        }
        names = {token.content for token in self.named.values()}
        tokens = [
            AddedToken(token.content, **{**flags_of(token), "special": True})
            if token.content in names
            else token
            for token in (*listed, *others.values())
        ]
        have = {token.content: flags_of(token) for token in own.values()}
        return [token for token in tokens if have.get(token.content) != flags_of(token)]


def read_special_tokens(folder: Path, tokenizer_config: Mapping[str, Any]) -> SpecialTokens:
    config = dict(tokenizer_config)
    if not config.get(EXTRA):
        config[EXTRA] = config.get(ADDITIONAL)
    if isinstance(listed := config.get("added_tokens_decoder"), dict):
        numbered = {int(id): _token(it) for id, it in listed.items() if TOKEN_ID.fullmatch(id)}
        by_id = {id: token for id, token in numbered.items() if token}
        return SpecialTokens(_named_tokens(config), _tokens(config.get(EXTRA)), by_id)
    older = read_optional_json(folder / MAP)
    lists = [each[EXTRA] for each in (config, older) if isinstance(each.get(EXTRA), list)]
    config |= older | ({EXTRA: [token for each in lists for token in each]} if lists else {})
    named, further = _named_tokens(config), _tokens(config.get(EXTRA))
    special = {token.content for name, token in named.items() if name in STANDARD}
    special |= {token.content for token in further}
    added = {
        id: token
        for text, id in read_optional_json(folder / ADDED).items()
        if type(id) is int and (token := _token(text, special=text in special))
    }
    if not further:
        further = _tokens(older.get(ADDITIONAL))
    return SpecialTokens(named, further, added, is_legacy=True)


def _named_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    named = {name: entry for name, entry in config.items() if name.endswith("_token")}
    named |= extra if isinstance(extra := config.get(EXTRA), dict) else {}
    tokens = {name: _token(entry, special=True) for name, entry in named.items()}
    return {name: token for name, token in tokens.items() if token}


def _tokens(listed: object) -> tuple[AddedToken, ...]:
    entries: Iterable[object] = listed if isinstance(listed, list) else ()
    return tuple(token for each in entries if (token := _token(each, special=True)))


def _token(entry: object, **flags: bool) -> AddedToken | None:
    """A token given as its text, or as an object with its flags; None if it is neither."""
    if isinstance(entry, dict):
        values = {name: entry.get(name) for name in FLAGS}
        flags |= {name: value for name, value in values.items() if isinstance(value, bool)}
        entry = entry.get("content")
    if not isinstance(entry, str) or not entry or SURROGATE.search(entry):
        return None
    return AddedToken(entry, **flags)


def flags_of(token: AddedToken) -> dict[str, bool]:
    return {name: getattr(token, name) for name in FLAGS}
