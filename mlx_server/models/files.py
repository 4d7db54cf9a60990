"""The files of a model's folder, which may be malicious: which of them count and may be read, and
what a file is that only has the name of one, since a failed download leaves others in its place.
The headers of its weights are read without loading any tensor, and show how these are quantised and
what memory they take.

The sentences continue one that begins with the file's name, and lack the full stop.
"""

import json
import logging
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from mlx_server import limits
from mlx_server.errors import ModelUnusable, public_message
from mlx_server.system.files import open_regular, read_regular

BYTES = 128
"""The bytes of a file's beginning that are looked at."""

BOM = b"\xef\xbb\xbf"

AGAIN = "Download it again"

LFS = "is a Git LFS pointer, not the file itself. Run `git lfs pull` in the folder of the clone"
PAGE = (
    "is a web page, not the file itself. Download it again; if it is gated, accept its terms and "
    "run `hf auth login` first"
)
GGUF = (
    "is a GGUF file. Use a checkpoint in safetensors, or convert the original model with "
    "`mlx_lm.convert`"
)
PICKLE = (
    "is a PyTorch file, which is never opened because such files can run code. Use a checkpoint in "
    "safetensors, or convert the original model with `mlx_lm.convert`"
)

KINDS = (
    (re.compile(rb"version https://git-lfs"), LFS),
    (re.compile(rb"(?i)\s*<(?:!doctype\s+html|html|head|body|!--)"), PAGE),
    (re.compile(rb"\s*<(?:\?xml|[Ee]rror)"), f"is an error that a server sent as XML. {AGAIN}"),
    (re.compile(rb"GGUF"), GGUF),
    (re.compile(rb"\xff\xfe|\xfe\xff"), "is UTF-16 text. Save it as UTF-8"),
    (re.compile(rb"PK\x03\x04|\x80[\x02-\x05]"), PICKLE),
    (re.compile(rb"\x1f\x8b|BZh|\xfd7zXZ|7z\xbc\xaf"), "is an archive. Unpack it"),
    (re.compile(rb"\0+\Z"), f"begins with zeros: its download was not finished. {AGAIN}"),
    (re.compile(rb"\Z"), f"is empty. {AGAIN}"),
)
"""Each kind, by its beginning."""

TEXT = re.compile(rb"[\t\n\r -~]+\Z")


def other_kind(begin: bytes) -> str | None:
    """What a file with this beginning is, and what to do; None if it may be a model's file."""
    begin = begin.removeprefix(BOM)[:BYTES]
    return next((what for pattern, what in KINDS if pattern.match(begin)), None)


def other_than_weights(begin: bytes) -> str | None:
    """Like `other_kind`, for a file that is not text."""
    if (what := other_kind(begin)) or not TEXT.match(begin[:BYTES]):
        return what
    quoted = begin[:BYTES].decode().strip().split("\n")[0][:60]
    return f"is text that begins with {quoted!r}. {AGAIN}"


def read_own(path: Path) -> bytes:
    """The content of a model's file. Raises ModelUnusable if it is something else, or OSError."""
    content = read_regular(path)
    if what := other_kind(content[: BYTES + len(BOM)]):
        raise ModelUnusable(f"{path.name} {what}.")
    return content


log = logging.getLogger("mlx_server.families")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, with or without a byte order mark. Raises ModelUnusable."""
    try:
        data = json.loads(read_own(existing(path)), object_pairs_hook=_made)
    except OSError as error:
        raise ModelUnusable(f"{path.name} can't be read: {public_message(error)}.") from None
    except (ValueError, RecursionError) as error:
        raise ModelUnusable(f"{path.name} is not valid JSON: {error}. {AGAIN}.") from None
    if not isinstance(data, dict):
        raise ModelUnusable(f"{path.name} must contain a JSON object. {AGAIN}.")
    return data


def _made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object as `json` does, but in Python, where other threads get their turn."""
    return dict(pairs)


def read_optional_json(path: Path) -> dict[str, Any]:
    """Like `read_json`; empty if there is no such file, or with a warning if it is damaged."""
    if not path.exists():
        return {}
    try:
        return read_json(path)
    except ModelUnusable as error:
        folder = path.parent.name
        log.warning("%s The model in %r is used without this file.", error.message, folder)
        return {}


def existing(path: Path) -> Path:
    """The path of a file. Raises ModelUnusable if there is none."""
    if not path.is_file():
        raise ModelUnusable(
            f"{path.name} is missing from the model's folder {path.parent.name!r}. "
            "Download the model again, or convert it with `mlx_lm.convert`."
        )
    return path


WEIGHTS = "model*.safetensors"

OWN = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
TOKENIZERS = (OWN, "tiktoken.model", SENTENCEPIECE)
"""Names of tokenizer files; the first that exists is used."""

MOST_BYTES: Mapping[str, int] = {
    "config.json": 4 << 20,
    "generation_config.json": 1 << 20,
    "hf_quant_config.json": 4 << 20,
    "tokenizer_config.json": 16 << 20,
    "special_tokens_map.json": 4 << 20,
    "added_tokens.json": 4 << 20,
    "tokenizer.json": limits.TOKENIZER_BYTES,
    "tokenizer.model": 64 << 20,
    "tiktoken.model": 64 << 20,
    "chat_template.jinja": 1 << 20,
    "chat_template.json": 1 << 20,
    "processor_config.json": 4 << 20,
    "preprocessor_config.json": 4 << 20,
    "video_preprocessor_config.json": 4 << 20,
    "additional_chat_templates/default.jinja": 1 << 20,
    "additional_chat_templates/tool_use.jinja": 1 << 20,
    "modules.json": 1 << 20,
    "1_Pooling/config.json": 4 << 20,
    "config_sentence_transformers.json": 1 << 20,
    "sentence_bert_config.json": 1 << 20,
}
"""Size limits of the files, other than weights, that mlx-server, mlx-lm or mlx-vlm reads. Real
files have at most a tenth of it."""


Stamp = tuple[tuple[str, int, int, int], ...]
"""Name, inode, modification time and size of each file that exists."""


def stamp_of_model(folder: Path) -> Stamp:
    """A value that changes when a file of the model is replaced, modified, added or removed."""
    return stamp_of_files(sorted({*_weights(folder), *map(folder.joinpath, MOST_BYTES)}))


def _weights(folder: Path) -> list[Path]:
    """The weight files, up to one more than the limit."""
    return list(islice(folder.glob(WEIGHTS), limits.CHECKPOINT_FILES + 1))


def stamp_of_files(paths: Iterable[Path]) -> Stamp:
    return tuple(filter(None, map(_stamp_of, paths)))


def _stamp_of(path: Path) -> tuple[str, int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return path.name, stat.st_ino, stat.st_mtime_ns, stat.st_size


SAMPLES, SAMPLE_BYTES = 4, 4096
"""The samples that are taken of each file of weights, in addition to its header and the time it was
modified."""


def identity_of_model(folder: Path) -> str:
    """A digest that other files do not have. Weights are not read whole, which takes minutes."""
    whole = sha256(repr(stamp_of_model(folder)).encode())
    whole.update(read_regular(folder / "config.json"))
    for path in sorted(_weights(folder)):
        size = path.stat().st_size
        with open_regular(path) as file:
            for at in range(SAMPLES):
                file.seek(size * at // SAMPLES)
                whole.update(file.read(SAMPLE_BYTES))
    return whole.hexdigest()


def is_inside(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def is_own(path: Path, folder: Path) -> bool:
    """Whether the path, with links resolved, is in the folder.

    Files of the hub's cache may be in its `blobs`, to which the snapshot folders link.
    """
    homes = [folder]
    if folder.parent.name == "snapshots":
        homes.append(folder.parent.parent / "blobs")
    return any(is_inside(path, home) for home in homes)


def check_model(folder: Path) -> None:
    """Raise ModelUnusable unless the model's files are its own and of a sensible size."""
    weights = _weights(folder)
    if len(weights) > (most_files := limits.CHECKPOINT_FILES):
        raise ModelUnusable(
            f"The model's folder {folder.name!r} has more than {most_files:,} files of weights. "
            "Download the model again."
        )
    for path in chain(weights, map(folder.joinpath, MOST_BYTES)):
        if os.path.lexists(path):
            _check_file(path, folder)


def _check_file(path: Path, folder: Path) -> None:
    name = path.relative_to(folder).as_posix()

    def unusable(what: str) -> ModelUnusable:
        return ModelUnusable(f"{name} in the model's folder {folder.name!r} {what}.")

    if not is_own(path, folder):
        raise unusable("is a link that leads out of the folder. Copy the file into it")
    if not path.is_file():
        raise unusable("is not a file. Download the model again")
    if name in MOST_BYTES and path.stat().st_size > MOST_BYTES[name]:
        raise unusable(f"is larger than {MOST_BYTES[name]:,} bytes. Download the model again")


SHARD = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})\.safetensors")
WEIGHTS_NAME = re.compile(r"model[^/]*\.safetensors")
OTHER_WEIGHTS = re.compile(r"(?!adapter).*\.(?:bin|gguf|h5|msgpack|npz|onnx|pth?|safetensors)")

SHOWN = 8
"""The number of missing files that an error lists by name."""


def missing(folder: Path) -> list[str]:
    return missing_of(path.name for path in folder.glob("*") if path.is_file())


def weights_instead(folder: Path) -> str | None:
    """A file of weights of another format or name, in a folder without others."""
    names = sorted(path.name for path in folder.glob("*"))
    if any(map(WEIGHTS_NAME.fullmatch, names)):
        return None
    return next(filter(OTHER_WEIGHTS.fullmatch, names), None)


def missing_of(names: Iterable[str]) -> list[str]:
    """Lists the files that a checkpoint with these files lacks.

    Raises ModelUnusable if the names promise too many files of weights.
    """
    present = set(names)
    weights = set(filter(WEIGHTS_NAME.fullmatch, present))
    shards = filter(None, map(SHARD.fullmatch, weights))
    series = {(shard[1], len(shard[2]), shard[3]) for shard in shards}
    most = limits.CHECKPOINT_FILES
    if max(len(weights), sum(int(count) for _, _, count in series)) > most:
        raise ModelUnusable(
            f"The checkpoint names more than {most:,} files of weights. Download the model again."
        )
    lacking = [] if "config.json" in present else ["config.json"]
    lacking += [] if present & set(TOKENIZERS) else ["tokenizer.json"]
    lacking += _missing_shards(series, weights) if weights else ["model*.safetensors"]
    more = len(lacking) - SHOWN
    return lacking if more <= 0 else [*lacking[:SHOWN], f"{more} more files"]


def _missing_shards(series: Iterable[tuple[str, int, str]], weights: AbstractSet[str]) -> list[str]:
    """The files that the numbers of others promise: of the files with one stem, those of the series
    that lacks the fewest. Further series, and files next to a whole one, are of an older copy.

    series: stem, digits of the number, and count.
    """
    lacking = {name.removesuffix(".safetensors"): set[str]() for name in weights}
    for stem, digits, count in series:
        first = 0 if f"{stem}-{0:0{digits}}-of-{count}.safetensors" in weights else 1
        numbers = range(first, first + int(count))
        names = {f"{stem}-{number:0{digits}}-of-{count}.safetensors" for number in numbers}
        lacking[stem] = min(names - weights, lacking.get(stem, names), key=len)
    return sorted(chain(*lacking.values()))


SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

METADATA = "__metadata__"


class BadHeader(Exception):
    """The file is invalid. The message continues a sentence that begins with the file's name."""


class NoWeights(BadHeader):
    """The file is of another kind. The message also says what to do."""


@dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset in the file, in bytes."""
    end: int


@dataclass(frozen=True)
class TensorsHeader:
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, object]


def read_header(file: BinaryIO, size: int, most: int) -> TensorsHeader:
    """The header of an open file of `size` bytes; it may have `most` bytes. Raises BadHeader."""
    start = file.read(BYTES)
    if start[8:9] != b"{" and (what := other_than_weights(start)):
        raise NoWeights(what)
    file.seek(8)
    if len(start) < 8:
        raise BadHeader("is cut short")
    (length,) = struct.unpack_from("<Q", start)
    if length > most:
        raise BadHeader(f"has a header of {length:,} bytes; the limit is {most:,}")
    text = file.read(length)
    if len(text) < length:
        raise BadHeader("is cut short")
    try:
        entries = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError):
        raise BadHeader("has a header that is not JSON") from None
    if not isinstance(entries, dict):
        raise BadHeader("has a header that is not a JSON object")
    metadata = entries.pop(METADATA, None) or {}  # null: of `mx.save_safetensors`
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise BadHeader("has metadata other than texts")
    tensors = {name: _tensor(name, entry, 8 + length) for name, entry in entries.items()}
    _check_layout(tensors, 8 + length, size)
    return TensorsHeader(tensors, metadata)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise BadHeader(f"names {name[:200]!r} twice")
    return data


def _tensor(name: str, entry: Any, data: int) -> Tensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = (*shape, begin, end)
        is_valid = all(type(n) is int and n >= 0 for n in numbers)
        if is_valid and math.prod(shape) * SIZES[dtype] == end - begin:
            return Tensor(dtype, tuple(shape), data + begin, data + end)
    except (TypeError, KeyError, ValueError):
        pass
    raise BadHeader(f"has an invalid header entry for the tensor {name[:200]!r}")


def _check_layout(tensors: Mapping[str, Tensor], data: int, size: int) -> None:
    """Raise BadHeader unless the tensors fill the file from the header to its end."""
    reached = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != reached:
            raise BadHeader(f"has tensors that overlap or leave a gap, at {name[:200]!r}")
        reached = tensor.end
    if reached > size:
        raise BadHeader("is cut short")
    if reached < size:
        raise BadHeader("is longer than its header says")


def read_header_of(path: Path, most: int) -> TensorsHeader:
    """Raises BadHeader or OSError."""
    with open_regular(path) as file:
        return read_header(file, os.fstat(file.fileno()).st_size, most)


NOT_OF_MLX = frozenset({"F64", "F8_E5M2"})


def weights_bytes(path: Path, upcast: bool) -> int:
    """Memory of the weights; with `upcast`, half precision is loaded as float32."""
    return sum(_tensor_bytes(file, upcast) for file in _weight_files(path))


def tensor_names(path: Path) -> Iterator[str]:
    """The names of all tensors of the weights. Raises ModelUnusable."""
    for file in _weight_files(path):
        yield from _tensors(file)


def weights_on_disk(path: Path) -> int:
    """The bytes of the weight files. Raises ModelUnusable if one is missing."""
    return sum(file.stat().st_size for file in _weight_files(path))


def _weight_files(path: Path) -> list[Path]:
    """The weight files that mlx-lm reads. The index is not asked: many conversions carry that of
    the original. Raises ModelUnusable if there are none."""
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise _unusable(path / "model.safetensors", "is missing")
    return files


def _tensor_bytes(file: Path, upcast: bool) -> int:
    tensors = _tensors(file)
    if strange := sorted({tensor.dtype for tensor in tensors.values()} & NOT_OF_MLX):
        raise _unusable(file, f"contains the type {strange[0]}, which MLX cannot read")
    return sum((t.end - t.begin) * _growth(t.dtype, upcast) for t in tensors.values())


def _tensors(file: Path) -> Mapping[str, Tensor]:
    try:
        return read_header_of(file, limits.CHECKPOINT_HEADER_BYTES).tensors
    except OSError as error:
        raise _unusable(file, f"cannot be read ({error.strerror})") from None
    except NoWeights as error:
        raise ModelUnusable(_in_folder(file, f"{error}.")) from None
    except BadHeader as error:
        raise _unusable(file, f"is damaged: it {error}") from None


def _growth(dtype: str, upcast: bool) -> int:
    """The factor by which a loaded tensor is larger than in its file."""
    unpacked = 2 if dtype.startswith("F8_") else 1  # most models unpack it to bfloat16
    return unpacked * (2 if upcast and (unpacked == 2 or dtype in ("F16", "BF16")) else 1)


def _unusable(file: Path, what: str) -> ModelUnusable:
    advice = "Download the model again, or convert it with `mlx_lm.convert`."
    return ModelUnusable(_in_folder(file, f"{what}. {advice}"))


def _in_folder(file: Path, what: str) -> str:
    return f"{file.name} in the model's folder {file.parent.name!r} {what}"


MLX, OTHERS = "quantization", "quantization_config"
"""The key of mlx-lm, and the one of other libraries, which mlx-lm writes too."""

MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
BITS = (2, 3, 4, 5, 6, 8)
METHODS = (
    "awq and gptq with 4 bits, mxfp4, mxfp8, nvfp4 of modelopt and compressed-tensors, bitnet, and "
    "fp8 where the architecture unpacks it"
)

CONVERTED = "Use a checkpoint that `mlx_lm.convert` made, for example from mlx-community."

NAME = r"\s*([^\s,]+?)\.?(?:[\s,]|$)"
SHAPE = r"(\([0-9, ]*+\))"
MISMATCHES = (
    (
        re.compile(rf"Received (\d+) parameters not in model:{NAME}"),
        "its weights have {0} tensors that mlx-lm's model lacks, such as {1:.200}. They belong to "
        "parts that mlx-lm does not use, or config.json is not of these weights. " + CONVERTED,
    ),
    (
        re.compile(rf"Missing (\d+) parameters:{NAME}"),
        "its weights lack {0} tensors of mlx-lm's model, such as {1:.200}. Download it again, with "
        "the config.json of these weights.",
    ),
    (
        re.compile(rf"Expected shape {SHAPE} but received shape {SHAPE} for parameter{NAME}"),
        "its tensor {2:.200} has the shape {1}, and by config.json it should have {0}. Copy the "
        "config.json of these weights.",
    ),
    (
        re.compile(r"missing \d+ required positional arguments?: (.+)"),
        "config.json lacks {0:.200}. Copy it from the original.",
    ),
)
"""What mlx-lm says of a config.json that is not of the weights, and what to do."""


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of a checkpoint that mlx-lm quantised; None if it did not."""
    own, other = config.get(MLX), config.get(OTHERS)
    if own is None and isinstance(other, dict) and "quant_method" not in other:
        own = other if {"group_size", "bits"} <= other.keys() else None
    return own if isinstance(own, dict) else None


def why_not_read(config: Mapping[str, Any], error: str) -> str | None:
    """Says which key of a config is not understood, and what is, or how the weights differ from it.
    error: what mlx-lm said of the weights. None: the error is another one."""
    if (own := config.get(MLX)) is not None and (what := _wrong_settings(own)):
        return what
    if own is None and (other := config.get(OTHERS)):
        method = other.get("quant_method") if isinstance(other, dict) else other
        why = f", or mlx-lm can't read them: {error[:300]}"
        if "local variable" in error:  # of a loop over packed tensors that found none
            why = ": no tensor is packed so"
        return (
            f"its weights are not what `{OTHERS}` in config.json says (`quant_method`: "
            f"{str(method)[:100]!r}){why}. It reads {METHODS}. {CONVERTED}"
        )
    if own is None and ".scales" in error:
        return (
            f"its weights are quantised, and config.json has no `{MLX}` that says how. Add "
            f'`"{MLX}": {{"group_size": 64, "bits": 4}}` with the values that were used. '
            f"{CONVERTED}"
        )
    mismatches = (
        what.format(*match.groups())
        for pattern, what in MISMATCHES
        if (match := pattern.search(error))
    )
    return next(mismatches, None) or _wrong_number(config, error)


WHOLE_NUMBER = re.compile("^(num|n)_|_(size|dim|layers?|heads?|rank)$")
"""Matches the names of settings that are whole numbers."""
OF_ZERO = re.compile("zero|not in list|^AssertionError")
"""Matches errors that a zero among them causes."""
POSITIVE_NUMBER = re.compile(
    r"eps(ilon)?$|rope_(\w{1,40}_)?(theta|base|base_freq)$|^rotary_emb_base$"
)
"""Matches the names of settings that are numbers above zero."""


def is_positive_number(value: object) -> bool:
    """Whether MLX can compute with it: it is neither infinite nor zero in 32 bits."""
    return isinstance(value, int | float) and 1e-38 < value < 3e38


def _wrong_number(config: Mapping[str, Any], error: str) -> str | None:
    """Names the number of a config with which mlx-lm could not make the model."""
    parts = {f"{key}.": part for key, part in config.items() if isinstance(part, dict)}
    for place, part in {"": config, **parts}.items():
        for key, value in part.items():
            if WHOLE_NUMBER.search(key):
                needed = "a whole number"
                is_wrong = type(value) is not int or not 0 <= value < 1 << 31
                is_wrong |= value == 0 and bool(OF_ZERO.search(error))
            elif POSITIVE_NUMBER.search(key):
                needed, is_wrong = "a number above zero", not is_positive_number(value)
            else:
                continue
            if value is None or isinstance(value, bool | list | dict):  # they may have a meaning
                is_wrong = type(value).__name__ in error
            if is_wrong:
                return (
                    f"`{place[:99]}{key[:99]}` in config.json is {str(value)[:99]!r}, and mlx-lm "
                    f"needs {needed} there: {error[:200]}. Copy the config.json of these weights."
                )
    return None


def _wrong_settings(settings: object) -> str | None:
    """What is wrong with the value of `quantization`, or with that of a layer in it."""
    if not isinstance(settings, dict):
        return _sentence(MLX, settings, "an object with `group_size` and `bits`")
    for name in ("group_size", "bits"):
        if name not in settings:
            return f"`{MLX}` in config.json lacks `{name}`. Copy it from the original. {CONVERTED}"
    layers = {f"{MLX}.{name}": it for name, it in settings.items() if isinstance(it, dict)}
    for place, entry in {MLX: settings, **layers}.items():
        if (bits := entry.get("bits", BITS[0])) not in BITS or isinstance(bits, bool):
            return _sentence(f"{place}.bits", bits, f"one of {', '.join(map(str, BITS))}")
        if (mode := entry.get("mode", MODES[0])) not in MODES:
            return _sentence(f"{place}.mode", mode, f"one of {', '.join(MODES)}")
        size = entry.get("group_size", 64)
        if type(size) is not int or size not in (16, 32, 64, 128):
            return _sentence(f"{place}.group_size", size, "16, 32, 64 or 128")
    return None


def _sentence(key: str, value: object, known: str) -> str:
    return (
        f"`{key[:200]}` in config.json is {str(value)[:100]!r}; mlx-lm reads {known}. {CONVERTED}"
    )
