"""mlx-vlm's processors make the tokens of pictures and what a model takes of them, where no recipe
says how: the program of a warm process, `picture_processor.py MEMORY_BYTES LIFELINE`.

Checkpoints' settings are read, and no code in them. Pictures come decoded. The server watches time
and memory; files can be opened, since transformers imports modules when it needs them.
"""

import os
import socket
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before anything imports huggingface_hub
    os.environ["HF_HUB_OFFLINE"] = "1"

import mlx.core as mx
import msgspec
import numpy as np
from PIL import Image
from safetensors.numpy import save

from mlx_server.models.architectures import module_of
from mlx_server.models.files import read_json
from mlx_server.models.vision import THREE_POSITIONS, packed_stamp, vision_of
from mlx_server.system.sandbox.child import end_with_server, serve
from mlx_server.system.sandbox.files import FileRefused, FileReply, ProcessPicture, read_safely
from mlx_server.system.sandbox.picture_recipes import Size
from mlx_server.worker.kv_caches import make_caches
from mlx_server.worker.vision_towers import make_tower, picture_inputs, whole_features
from mlx_server.worker.whole_models import whole_model

MOST_PROCESSORS = 4
"""Those that were used last are kept."""

OF_TEXT = {"attention_mask", "token_type_ids", "mm_token_type_ids"}
"""What processors make of a text besides its ids."""

PLACEHOLDERS = ("image_placeholder_token", "image_token")
"""Names of what a processor replaces by a picture's tokens; one without it needs no text."""


TOO_SMALL = "is too small or too narrow for mlx-vlm's processor"


def refuse_code(*_: Any, **__: Any) -> None:
    raise ValueError("it needs code of its own, which mlx-server never runs")


class BorrowedProcessor:
    def __init__(self, folder: Path) -> None:
        config = read_json(folder / "config.json")
        vision = vision_of(folder, config)
        package = vision.family.package if vision else ""
        import_module(f"mlx_vlm.models.{package}")  # adds its processor to these:
        from transformers import AutoProcessor, dynamic_module_utils

        # some of mlx-vlm's processors trust a checkpoint's code, whatever they are told
        dynamic_module_utils.get_cached_module_file = refuse_code
        self._call: Callable[..., Any] = AutoProcessor.from_pretrained(
            str(folder), trust_remote_code=False
        )
        texts = (str(getattr(self._call, name, None) or "") for name in PLACEHOLDERS)
        self._text = next(filter(None, texts), "")
        tokenizer: Any = vars(self._call).get("tokenizer")
        self._begin = list(tokenizer("").input_ids) if tokenizer else []
        _, inputs = self.inputs(np.zeros((60, 90, 3), np.uint8))
        # its weights are never made: it shows whether it takes what the processor makes
        if module_of(config):
            model = make_tower(config, package)
        else:
            model = whole_model(config)
            model(mx.zeros((1, 2), mx.int32), cache=make_caches(model))
        model.eval()
        before = _state(model)
        whole_features(model, picture_inputs(inputs))
        if package not in THREE_POSITIONS and _state(model) != before:
            raise ValueError("its text model keeps what it knows of a picture")

    def inputs(self, pixels: Any) -> tuple[FileReply, bytes]:
        image = Image.fromarray(pixels)
        inputs = {**self._call(text=[self._text], images=[image], padding=True)}
        ids = np.asarray(inputs["input_ids"]).reshape(1, -1)
        inputs["input_ids"] = ids
        views = _views(inputs.setdefault("pixel_values", inputs.pop("images", None)))
        if not ids.size or not views:
            raise FileRefused(TOO_SMALL)
        arrays = {n: np.ascontiguousarray(v) for n, v in inputs.items() if n not in OF_TEXT}
        for name in [name for name, array in arrays.items() if array.dtype == np.float64]:
            arrays[name] = arrays[name].astype(np.float32)
        begin = len(self._begin) * (ids[0, : len(self._begin)].tolist() == self._begin)
        places = {"begin": str(begin), "end": str(ids.size)}
        return FileReply(views, ids[0, begin:].tolist()), save(arrays, places)


def _state(model: Any) -> set[tuple[int, str, int]]:
    """What the model and its text model have, from which a row could get what another one left."""
    modules = enumerate([model, *model.language_model.modules()])
    return {(n, name, id(own)) for n, m in modules for name, own in {**vars(m), **m}.items()}


def _views(pixels: Any) -> list[Size]:
    """The pixels of each view: those in flat patches are as wide as they are many."""
    if isinstance(pixels, list):
        return [view for each in pixels for view in _views(each)]
    shape = np.shape(pixels)
    inner = 3 if len(shape) > 3 or 3 in (shape[0], shape[-1]) else 2
    view = prod(shape[-inner:]) // 3
    return [(view, 1)] * prod(shape[:-inner])


@lru_cache(MOST_PROCESSORS)
def processor_of(folder: bytes, stamp: bytes) -> BorrowedProcessor:
    """stamp: another one has it made again."""
    path = Path(os.fsdecode(folder))
    if packed_stamp(path) != stamp:
        raise FileRefused(
            "can't be read: the model's files have been replaced since it was loaded. Unload it, "
            "so that the new ones are read"
        )
    try:
        return BorrowedProcessor(path)
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:300]}"
        raise FileRefused(f"is not taken by mlx-vlm's model or processor ({why})") from None


def process(request: ProcessPicture) -> tuple[FileReply, bytes]:
    processor = processor_of(request.folder, request.stamp)
    if not request.pixels:
        return FileReply(), b""
    (width, height), data = request.size, np.frombuffer(request.pixels, np.uint8)
    try:
        return processor.inputs(data.reshape(height, width, 3))
    except (ArithmeticError, ValueError) as error:  # of its sides: its pixels are decoded
        raise FileRefused(f"{TOO_SMALL} ({str(error)[:300]})") from None


def _answer(frame: bytearray) -> tuple[FileReply, bytes]:
    return read_safely(process, msgspec.msgpack.decode(frame, type=ProcessPicture))


def main() -> None:
    end_with_server(int(sys.argv[2]))
    mx.set_default_device(mx.cpu)  # type: ignore[arg-type, unused-ignore]
    serve(socket.socket(fileno=0), _answer)


if __name__ == "__main__":
    main()
