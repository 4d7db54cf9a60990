"""Reads weights from a checkpoint folder, a piece at a time."""

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_server import limits
from mlx_server.errors import ModelUnusable, public_message
from mlx_server.models.architectures import (
    SAME,
    WRAPPING,
    is_encoder,
    text_config_of,
    texts,
    whole_package,
)
from mlx_server.models.files import is_positive_number, why_not_read
from mlx_server.worker.encoders import encoder_classes
from mlx_server.worker.kernels import has_gpu
from mlx_server.worker.mlx_lm_internals import (
    get_classes,
    load_model,
    make_prompt_cache,
    read_config,
)
from mlx_server.worker.replay_model import ReplayModel
from mlx_server.worker.sight import give_sight, sight_of
from mlx_server.worker.whole_models import whole_classes

log = logging.getLogger("mlx_server.engine")

MODULES = "modules.json"
"""The file that shows a checkpoint of sentence-transformers."""

HALF_PRECISIONS = {"bfloat16": mx.bfloat16, "float16": mx.float16}

REPLAY = "replay"
"""The model type of checkpoints without weights."""


DECODING_SECONDS = 0.008
"""Seconds of reading between two steps while rows decode: less than a step takes."""

ALONE_SECONDS = 0.25
"""Seconds of a piece while no row is running: short enough to notice a command soon."""

FIRST_BYTES = 8 << 20
LEAST_BYTES, MOST_BYTES = 1 << 20, 2 << 30

MOST_GROWTH = 4.0
"""The most growth from one piece to the next: one that came from the page cache says little about
the disk."""


class WeightReadPace:
    """Decides how many bytes of weights to read between two steps, by the time that reading takes.

    A disk reads 0.1 to 8 GB a second, and MLX converts some weights while it reads, so a fixed
    number of bytes would not bound how long the rows of other models wait.
    """

    def __init__(self) -> None:
        self.while_decoding = False
        """Whether rows wait for each piece to be read."""
        self._rate: float | None = None
        """Bytes per second, smoothed; None before the first piece."""
        self._last = 0

    @property
    def nbytes(self) -> int:
        """The size of the next piece. A tensor that is larger is read as a whole."""
        if self._rate is None:
            return min(FIRST_BYTES, MOST_BYTES)
        wanted = self._rate * (DECODING_SECONDS if self.while_decoding else ALONE_SECONDS)
        return int(min(MOST_BYTES, MOST_GROWTH * self._last, max(LEAST_BYTES, wanted)))

    def learn(self, nbytes: int, seconds: float) -> None:
        """Adjusts the rate by the time that a piece took."""
        rate = nbytes / max(seconds, 1e-6)
        self._rate = rate if self._rate is None else 0.5 * (self._rate + rate)
        self._last = max(nbytes, LEAST_BYTES)


Reading = Generator[tuple[int, int], None, nn.Module]
"""Yields (bytes read, total bytes), first before any is read; returns the model."""


def load(
    path: Path,
    pace: WeightReadPace | None = None,
    cut: Callable[[nn.Module], None] = lambda model: None,
    dtype: mx.Dtype | None = None,
    *,
    sees: bool = False,
    wire: Callable[[int], None] = lambda total: None,
) -> Reading:
    """pace: decides how many bytes each piece has. cut: see `WholeModel`. dtype: of what has 16
    bits; None: that of the file, or float32 without a GPU. sees: whether the vision tower is loaded
    too. wire: called with the total bytes before any is read."""
    config = read_config(path)
    if config.get("model_type") == REPLAY:
        return ReplayModel(config["vocab_size"])
    is_embedder = (path / MODULES).is_file()
    classes = embedder_classes if is_embedder else model_classes
    if is_encoder(config):
        classes = encoder_classes
    try:
        model = load_model(path, config, classes)
        _check_numbers(model)
    except Exception as error:
        if why := why_not_read(config, public_message(error)):
            raise ModelUnusable(why) from error
        raise
    if sees:
        try:
            give_sight(model, path, config)
        except Exception:  # of another mlx-vlm, or of a tower that is not as expected
            log.exception("the model in %s sees no pictures: its tower can't be loaded", path.name)
    # The model's random initial weights were never evaluated. Seeding drops their unevaluated
    # random keys, which would form a longer chain with each load.
    mx.random.seed(0)
    for module in _modules(model):
        if dtype:
            module.set_dtype(dtype, lambda stored: stored in (mx.bfloat16, mx.float16))
        elif not has_gpu():
            # MLX's CPU kernels are several times faster in float32 than in either half precision.
            module.set_dtype(mx.float32)
    cut(model)
    total = sum(array.nbytes for array in arrays(model))
    done = 0
    wire(total)
    yield done, total
    unread = deque(arrays(model))
    pace = pace or WeightReadPace()
    while unread:
        piece = _piece(unread, pace.nbytes)
        began = time.perf_counter()
        mx.eval(piece)
        nbytes = sum(array.nbytes for array in piece)
        pace.learn(nbytes, time.perf_counter() - began)
        del piece
        done += nbytes
        yield done, total
    return model


def loaded(path: Path) -> nn.Module:
    """Reads all weights at once."""
    reading = load(path)
    while True:
        try:
            next(reading)
        except StopIteration as end:
            model: nn.Module = end.value
            return model


def _check_numbers(model: nn.Module) -> None:
    """mlx-lm makes layers with any of these numbers, which then fail or compute NaN."""
    for layer in model.modules():
        number = getattr(layer, "base" if isinstance(layer, nn.RoPE) else "eps", 1)
        if not (isinstance(number, mx.array) or is_positive_number(number)):
            kind = type(number).__name__
            raise ValueError(f"a layer can't compute with {str(number)[:20]} ({kind})")
        if (frequencies := layer.get("_freqs")) is not None and not mx.all(frequencies > 0):
            raise ValueError("a layer can't compute with such frequencies")


def model_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type[Any]]:
    for text in texts(config):
        layers = text.get("num_hidden_layers")
        # mlx-lm makes as many layers as config.json says, before it looks at the weights.
        if isinstance(layers, int) and layers > limits.CHECKPOINT_LAYERS:
            raise ValueError(f"`num_hidden_layers` in config.json is {layers}: correct it.")
    if whole_package(config):
        return whole_classes(config)
    if config["model_type"] in WRAPPING:
        return wrapping_classes(config)
    model, arguments = get_classes({**config, "model_type": SAME.get(t := config["model_type"], t)})
    return (named_by_all(model) if t == "gemma3n" else model), arguments


def named_by_all(model: type[nn.Module]) -> type[nn.Module]:
    """Gemma 3n's class, which has mlx-vlm's names of tensors too, and no other parts."""

    class Gemma3nModel(model):
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            matches = filter(None, map(IN_TEXT.fullmatch, weights))
            return {f"model.language_model.{e[1]}": weights[e[0]] for e in matches if e[1]}

    return Gemma3nModel


IN_TEXT = re.compile(
    r"(?:(?:model\.)?(?:language_model|text_model)\.(?:model\.)?|model\.(?=layers|embed_tokens|norm))"
    r"(.+)|(lm_head\..+)"
)
"""Matches the names of a text model's tensors."""


def wrapping_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type[Any]]:
    """Returns the classes of a model around a text model of mlx-lm."""
    text = text_config_of(config)
    inner, arguments = get_classes({**text, "model_type": SAME.get(t := text["model_type"], t)})
    settings = {"head_dim": text["hidden_size"] // text["num_attention_heads"], **text}

    class WrappingModel(nn.Module):
        def __init__(self, made: Any) -> None:
            super().__init__()
            self.model_type = config["model_type"]
            self.language_model = inner(made)

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            logits: mx.array = self.language_model(inputs, cache=cache)
            return logits

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            own: dict[str, mx.array] = {}
            for match in filter(None, map(IN_TEXT.fullmatch, weights)):
                name = match[1] or match[2]
                is_head = name.startswith(("lm_head.", "output."))  # InternLM 2 has the other one
                own[name if is_head else f"model.{name}"] = weights[match[0]]
            clean = getattr(self.language_model, "sanitize", dict)(own)
            return {f"language_model.{name}": array for name, array in clean.items()}

        @property
        def layers(self) -> Any:
            return self.language_model.layers

        def make_cache(self) -> Any:
            return make_prompt_cache(self.language_model)

    class WrappedArguments:
        @staticmethod
        def from_dict(given: dict[str, Any]) -> Any:
            return arguments.from_dict(settings)

    return WrappingModel, WrappedArguments


def embedder_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type[Any]]:
    """Returns the classes for weights that were saved without the output head, whose names then
    lack the prefix that mlx-lm's models have."""
    if str((config.get("architectures") or [""])[0]).endswith("Model"):
        config["tie_word_embeddings"] = True  # mlx-lm needs a head, and there is no other
    model, arguments = model_classes(config)

    class Prefixed(model):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            if "embed_tokens.weight" in weights:
                weights = {f"model.{name}": array for name, array in weights.items()}
            sanitize = getattr(super(), "sanitize", None)
            return sanitize(weights) if sanitize else weights

    return Prefixed, arguments


def arrays(model: nn.Module) -> list[mx.array]:
    return [a for each in _modules(model) for _, a in tree_flatten(each.parameters())]


def _modules(model: nn.Module) -> list[nn.Module]:
    """The text model and its tower."""
    sight = sight_of(model)
    return [model, sight.tower] if sight and sight.tower is not model else [model]


def _piece(unread: deque[mx.array], nbytes: int) -> list[mx.array]:
    """Takes tensors of up to `nbytes`, but at least one: a tensor can't be read in parts."""
    piece = [unread.popleft()]
    size = piece[0].nbytes
    while unread and size + unread[0].nbytes <= nbytes:
        piece.append(unread.popleft())
        size += piece[-1].nbytes
    return piece
