"""Reads the facts about a model that are known before its weights are loaded."""

import logging
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mlx_server import limits
from mlx_server.engine.messages import NO_CACHES, ComputeDtype, KvCost
from mlx_server.engine.worker_arguments import RankGroup
from mlx_server.errors import (
    AdapterInvalid,
    ModelReplaced,
    ModelUnusable,
    ServerError,
    SettingsError,
)
from mlx_server.families import family_named, family_of, fitted
from mlx_server.families.base import ModelFamily
from mlx_server.messages import Conversation, Media
from mlx_server.models.adapter_catalog import AdapterCatalog, AdapterLocation, read_base_shapes
from mlx_server.models.architectures import INSTALL, is_encoder, is_reranker, whole_package
from mlx_server.models.checkpoint import (
    Checkpoint,
    Embedder,
    check_architecture,
    check_layer_count,
    read_checkpoint,
    width_of,
)
from mlx_server.models.files import (
    Stamp,
    check_model,
    stamp_of_files,
    stamp_of_model,
    tensor_names,
    weights_bytes,
    weights_on_disk,
)
from mlx_server.models.vision import (
    IN_TOWER,
    NO_TOKEN,
    Borrowed,
    Vision,
    borrowing,
    can_see,
    vision_of,
    within_memory,
)
from mlx_server.pool.memory import WORKING_BYTES
from mlx_server.prompts.infill import infill_tokens_of
from mlx_server.requests import (
    ALL_REPAIRS,
    GenerateRequest,
    RepairPolicy,
    SamplingChoices,
    SamplingParams,
)
from mlx_server.sources.cache import Progress, cache_dir
from mlx_server.sources.replay_checkpoint import replay_checkpoint
from mlx_server.sources.source import adapter_on_disk, on_disk, resolve, resolve_adapter
from mlx_server.sources.tokenizer_files import tokenizer_json
from mlx_server.sources.transcript import Recordings, read_transcript
from mlx_server.system.sandbox.files import FileRefused
from mlx_server.upstream.spec import UpstreamSpec

log = logging.getLogger("mlx_server.pool")

REPLAY = "replay:"


@dataclass(frozen=True)
class AdapterSource:
    """One entry of a model's `adapters:` in models.yaml."""

    path: str
    """A folder or a Hugging Face hub id."""
    allow_other_base: bool = False


Task = Literal["generate", "embed", "rerank"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The settings of a model, apart from its source."""

    revision: str | None = None
    """A branch, tag or commit of the hub repository; None: the newest commit."""
    aliases: tuple[str, ...] = ()
    family: str | None = None
    chat_template: str | None = None
    """The text of a template that overrides the checkpoint's own."""
    context_length: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Values of chat template variables, unless a request sets them."""
    constrain_calls: bool | None = None
    """Whether a tool call that the model starts by itself is constrained to the tool's schema. None
    means yes, except for a replay model, which plays its recording as it is."""
    images: Literal["describe", "refuse"] = "describe"
    """Whether a question with images, or other media, that the model can't take is answered, with a
    line of text in their place, or refused. Those of the history are never refused."""
    compute_ahead: int = 0
    """The most tokens of a conversation's next prompt that an idle engine computes."""
    kv_bits: Literal[4, 8] | None = None
    """The bits per value of a quantised KV cache; None: it is not quantised."""
    compute_dtype: ComputeDtype = "auto"
    speculation: Literal["auto", "off"] = "auto"
    """Whether passes may compute drafted tokens, where that gives more tokens a second."""
    deterministic: bool = False
    """Whether all answers are computed so that nothing else changes a bit of them."""
    repair: RepairPolicy = ALL_REPAIRS
    preload: bool = False
    pinned: bool = False
    task: Task | None = None
    """The model's task; None: the one that its files show."""
    ttl: float | None = None
    """The seconds without a request after which the model is unloaded; None: it stays."""
    adapters: Mapping[str, AdapterSource] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSpec(ModelOptions):
    """One entry of models.yaml."""

    id: str
    source: str
    max_tokens: int | None = None
    choices: SamplingChoices = field(default_factory=SamplingChoices)
    adapters_dir: Path | None = None
    """A folder of adapters, each of which is offered for every model that it fits."""
    recordings: Recordings | None = None
    """The recordings of a replay model, unless they are in the file that `source` names."""
    upstream: UpstreamSpec | None = None
    """The other server that has the model; None for a model that this server runs."""
    group: RankGroup | None = None
    """The ranks of a model over several machines; None for a model on this machine alone."""


@dataclass(frozen=True)
class PreparedModel:
    spec: ModelSpec
    path: Path
    checkpoint: Checkpoint
    family: ModelFamily
    tokenizer_json: Path
    weights: int
    """The estimated bytes of the weights in memory."""
    kv: KvCost = NO_CACHES
    """The memory cost of its rows, which the engine process measures."""
    most_padding: int | None = None
    """The most tokens by which a group of its decoding rows is padded; None: there is no limit."""
    transcript: Recordings | None = None
    """The recorded answers that a replay model plays."""
    adapters: AdapterCatalog | None = None
    """Its adapters; None for a replay model, which has no layers to adapt."""
    stamp: Stamp = ()
    """The stamp of the files, taken before they were read."""
    size_bytes: int = 0
    """The bytes of the weight files."""
    vision: Vision | None = None
    """How it is shown pictures; None for a model that sees none."""
    tower_bytes: int = 0
    """What its tower takes for a picture beyond what is kept free for every computation."""

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def context_length(self) -> int:
        return _context_length(self.spec, self.checkpoint)

    def takes(self, medium: Media) -> bool:
        return self.vision is not None and medium.kind == "image"

    @property
    def task(self) -> Task:
        return task_of(self.spec, self.checkpoint)

    @property
    def capabilities(self) -> "Capabilities":
        of_files = self.checkpoint, self.family, self.size_bytes
        return _capabilities(self.spec, *of_files, sees=self.vision is not None)

    @property
    def embedder(self) -> Embedder:
        """How the model makes embeddings: by default from the hidden state of the last token,
        normalised, as vLLM does."""
        return self.checkpoint.embedder or Embedder(width_of(self.checkpoint.config))


def _context_length(spec: ModelSpec, checkpoint: Checkpoint) -> int:
    """The context length that models.yaml sets, or the checkpoint's. An encoder can't have more
    than the checkpoint's, since it has no positions after that."""
    longest = checkpoint.context_length
    asked = spec.context_length or longest
    return min(asked, longest) if is_encoder(checkpoint.config) else asked


def _longest_input(spec: ModelSpec, checkpoint: Checkpoint) -> int:
    """The context length, or the shorter input that an embedding model was trained for."""
    context = _context_length(spec, checkpoint)
    embedder = checkpoint.embedder if task_of(spec, checkpoint) == "embed" else None
    return min(context, embedder.max_tokens or context) if embedder else context


def task_of(spec: ModelSpec, checkpoint: Checkpoint) -> Task:
    if spec.task:
        return spec.task
    if checkpoint.embedder:
        return "embed"
    if is_reranker(checkpoint.config):
        return "rerank"
    # the key by which vLLM's users list the tokens, `no` and `yes`, that a reranker answers with
    return "rerank" if checkpoint.config.get("classifier_from_token") else "generate"


def check_task(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Raises ModelUnusable if models.yaml sets a task that the architecture can't do."""
    task, config = task_of(spec, checkpoint), checkpoint.config
    if is_encoder(config) and (task == "generate" or (task == "rerank") != is_reranker(config)):
        right = "rerank" if is_reranker(config) else "embed"
        raise ModelUnusable(
            f"{spec.id} is an encoder, and `task: {task}` in models.yaml is not what it was "
            f"trained for. Set `task: {right}`, or leave it out."
        )


@dataclass(frozen=True)
class Capabilities:
    """The facts about a model that clients see: what it is and which requests it can serve."""

    family: str
    architecture: str
    """The `model_type` of its config.json."""
    quantization: str | None
    size_bytes: int
    """The bytes of the weight files."""
    context_length: int | None
    """The context length in tokens; None if it is not known, as may be for an upstream model."""
    reasoning: bool
    tools: bool
    structured_output: bool
    fill_in_the_middle: bool = False
    task: Task = "generate"
    is_encoder: bool = False
    sees: bool = False
    """Whether it is shown pictures."""
    unused_heads: int = 0
    """See `Checkpoint.unused_heads`."""


def capabilities_on_disk(spec: ModelSpec) -> Capabilities | None:
    """Reads the capabilities from the model's files without its weights; None if files are missing
    or damaged."""
    try:
        if spec.source.startswith(REPLAY):
            return _capabilities(spec, *_replay_checkpoint(spec)[1:], size_bytes=0)
        if (path := on_disk(spec.source, spec.revision)) is None:
            return None
        check_model(path)
        checkpoint = read_checkpoint(path, spec.chat_template, tokenizer_json(path))
        family = family_of(checkpoint, spec.family)
        sees = _vision(spec, path, checkpoint) is not None
        return _capabilities(spec, checkpoint, family, weights_on_disk(path), sees=sees)
    except (ServerError, OSError, MemoryError):  # `prepare` raises it for a request
        return None


def stamp_on_disk(spec: ModelSpec) -> Stamp | None:
    """A value that changes with the model's files; None if there are none."""
    if spec.source.startswith(REPLAY):
        return None
    try:
        path = on_disk(spec.source, spec.revision)
        return None if path is None else stamp_of_model(path)
    except (ServerError, OSError):
        return None


def _capabilities(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    family: ModelFamily,
    size_bytes: int,
    *,
    sees: bool = False,
) -> Capabilities:
    task = task_of(spec, checkpoint)
    answers = task == "generate"
    return Capabilities(
        task=task,
        sees=sees,
        is_encoder=is_encoder(checkpoint.config),
        family=family.name,
        architecture=checkpoint.model_type,
        quantization=checkpoint.quantization,
        size_bytes=size_bytes,
        unused_heads=checkpoint.unused_heads if size_bytes else 0,
        context_length=_longest_input(spec, checkpoint),
        reasoning=answers and family.thinks(checkpoint),
        tools=answers and family.has_calls,
        structured_output=answers and bool(family.stops(checkpoint)),
        fill_in_the_middle=answers and infill_tokens_of(checkpoint.tokenizer) is not None,
    )


def prepare(
    spec: ModelSpec,
    progress: Progress,
    *,
    upcast: bool,
    budget: int | None = None,
    unusable: ModelUnusable | None = None,
) -> PreparedModel:
    """Downloads missing files and reads them, so it may block for long. Raises ServerError.

    upcast: see `weights_bytes`. budget: the bytes above which weights are not downloaded. unusable:
    the error of the last attempt, raised again if the files are the same.
    """
    if spec.source.startswith(REPLAY):
        return _replay(spec)
    path = resolve(spec.source, progress, revision=spec.revision, budget=budget)
    stamp = stamp_of_model(path)
    if unusable and unusable.stamp == stamp:
        raise copy(unusable)
    try:
        return _read(spec, path, stamp, progress, upcast)
    except ModelUnusable as error:
        if spec.id not in error.message:
            error.message = f"{spec.id}: {error.message}"
        if error.of_files and not isinstance(error.__context__, OSError | MemoryError):
            error.stamp = stamp
        raise


def _read(
    spec: ModelSpec, path: Path, stamp: Stamp, progress: Progress, upcast: bool
) -> PreparedModel:
    tokenizer = tokenizer_json(path)
    checkpoint = read_checkpoint(path, spec.chat_template, tokenizer)
    check_architecture(checkpoint.config, spec.id)
    check_layer_count(checkpoint.config, path)
    check_task(spec, checkpoint)
    vision = _vision(spec, path, checkpoint)
    seen = working = 0
    if vision:
        vision, working = within_memory(vision, checkpoint.config, upcast=upcast)
        working = max(0, working - WORKING_BYTES)
        seen = limits.PICTURE_FEATURE_BYTES * bool(vision) + working
    prepared = PreparedModel(
        spec=spec,
        path=path,
        checkpoint=checkpoint,
        family=fitted(family_of(checkpoint, spec.family), checkpoint),
        tokenizer_json=tokenizer,
        weights=weights_bytes(path, upcast) + seen,
        tower_bytes=working,
        adapters=_catalog(spec, path, progress),
        stamp=stamp,
        size_bytes=weights_on_disk(path),
        vision=vision,
    )
    check_files(prepared)
    return prepared


def _vision(spec: ModelSpec, path: Path, checkpoint: Checkpoint) -> Vision | None:
    """How the model is shown pictures. Of a model over several machines, no rank has the tower."""
    vision = vision_of(path, checkpoint.config)
    if vision is None or task_of(spec, checkpoint) != "generate":
        return None
    if spec.group:
        log.warning("%s is shown no pictures: it runs on several machines", spec.id)
        return None
    tokens = checkpoint.tokenizer.control_tokens
    if vision.token == NO_TOKEN:
        ids = (id for id, token in tokens.items() if token == vision.family.token)
        vision = replace(vision, token=next(ids, NO_TOKEN))
    token = tokens.get(vision.token, "")
    if is_whole := bool(whole_package(checkpoint.config)):
        if not (token and can_see()):
            raise ModelUnusable(
                f"{LACKED}. For mlx-vlm's, its config.json has to name an image token of its "
                f"tokenizer, and this be installed: {INSTALL}"
            )
    # converters for text models keep the tower's settings and drop its weights
    elif not (token and any(map(IN_TOWER.match, tensor_names(path))) and can_see()):
        return None
    if not isinstance(vision.recipe, Borrowed):
        return vision if token in vision.text else None
    try:
        return borrowing(vision, token)
    except FileRefused as refused:
        if is_whole:
            raise ModelUnusable(f"{LACKED}, and a picture {refused}. Use another.") from None
        log.warning("%s is shown no pictures: each %s", spec.id, refused)
        return None


LACKED = "it can't be used: mlx-lm has no model of its type"


def check_files(prepared: PreparedModel) -> None:
    """Raises ModelReplaced if the files have changed since they were read."""
    if prepared.stamp != _stamp(prepared.spec, prepared.path):
        raise ModelReplaced(
            f"The files of {prepared.id} were replaced while they were being read. Send the "
            "request again when the new files are complete."
        )


def is_current(prepared: PreparedModel) -> bool:
    """Whether the source still resolves to the files that were read. It reads the disk, so it may
    block."""
    spec = prepared.spec
    path = prepared.path if spec.source.startswith(REPLAY) else on_disk(spec.source, spec.revision)
    return path == prepared.path and prepared.stamp == _stamp(spec, path)


def _stamp(spec: ModelSpec, path: Path) -> Stamp:
    if not spec.source.startswith(REPLAY):
        return stamp_of_model(path)
    return () if spec.recordings else stamp_of_files([_transcript_file(spec)])


def _transcript_file(spec: ModelSpec) -> Path:
    return Path(spec.source.removeprefix(REPLAY))


def _catalog(spec: ModelSpec, path: Path, progress: Progress) -> AdapterCatalog:
    listed = {name: _location(source, progress) for name, source in spec.adapters.items()}
    return AdapterCatalog(read_base_shapes(path, spec.source), listed, spec.adapters_dir)


def catalog_on_disk(spec: ModelSpec) -> AdapterCatalog | None:
    """The adapters that are on disk, without any download; None for a replay model."""
    if spec.source.startswith(REPLAY):
        return None
    folders = {name: adapter_on_disk(source.path) for name, source in spec.adapters.items()}
    listed = {
        name: AdapterLocation(path, spec.adapters[name].allow_other_base)
        for name, path in folders.items()
        if path
    }
    base = read_base_shapes(on_disk(spec.source, spec.revision), spec.source)
    return AdapterCatalog(base, listed, spec.adapters_dir)


def _location(source: AdapterSource, progress: Progress) -> AdapterLocation:
    try:
        folder = resolve_adapter(source.path, progress)
    except AdapterInvalid as error:  # the model is usable without this adapter
        log.error("%s", error.message)
        folder = Path(source.path)
    return AdapterLocation(folder, source.allow_other_base)


def _replay_checkpoint(spec: ModelSpec) -> tuple[Path, Checkpoint, ModelFamily]:
    if spec.family is None:
        raise SettingsError(f"{spec.id}: a replay model needs a `family:` in models.yaml.")
    family = family_named(spec.family)
    path = replay_checkpoint(cache_dir() / "replay", family)
    return path, read_checkpoint(path, spec.chat_template), family


def _replay(spec: ModelSpec) -> PreparedModel:
    stamp = _stamp(spec, Path())
    path, checkpoint, family = _replay_checkpoint(spec)
    vocabulary = checkpoint.config["vocab_size"]
    return PreparedModel(
        spec=spec,
        path=path,
        checkpoint=checkpoint,
        family=fitted(family, checkpoint),
        tokenizer_json=path / "tokenizer.json",
        weights=0,
        transcript=spec.recordings or read_transcript(_transcript_file(spec), vocabulary),
        stamp=stamp,
    )


NOTHING: SamplingChoices = {}


def sampling(
    spec: ModelSpec, request: GenerateRequest, published: SamplingChoices = NOTHING, choice: int = 0
) -> SamplingParams:
    """The sampling parameters of one answer, each from the first that sets it: the request,
    models.yaml, the checkpoint, the default.

    published: those of the checkpoint. choice: the number of the answer among the `n`.
    """
    deterministic = request.deterministic or spec.deterministic
    seed = 0 if request.seed is None and deterministic else request.seed
    return SamplingParams(
        **sampling_choices(spec, request, published),
        logit_bias=request.logit_bias,
        # each of the n answers needs another seed, or they would all be the same
        seed=None if seed is None else seed + choice,
        logprobs=request.logprobs,
    )


def sampling_choices(
    spec: ModelSpec, request: GenerateRequest, published: SamplingChoices = NOTHING
) -> SamplingChoices:
    return {**published, **spec.choices, **request.choices}


def token_limit(spec: ModelSpec, request: GenerateRequest) -> int | None:
    return spec.max_tokens if request.max_tokens is None else request.max_tokens


def template_kwargs(spec: ModelSpec, conversation: Conversation) -> Mapping[str, Any]:
    return {**spec.template_kwargs, **conversation.template_kwargs}


def completed(spec: ModelSpec, conversation: Conversation) -> Conversation:
    """The conversation as it is rendered, here or by another server."""
    return replace(conversation, template_kwargs=template_kwargs(spec, conversation))
