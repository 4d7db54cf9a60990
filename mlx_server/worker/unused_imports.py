"""Leaves out what mlx-lm imports and the engine never calls.

mlx-lm imports transformers for its tokenizers and huggingface_hub for its downloads. The engine
gets token ids and folders: importing the two took two thirds of its start, and 30 MB.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

UNUSED = ("transformers", "huggingface_hub")


class _Placeholder:
    """Stands for every name of an unused module; mlx-lm derives classes from some of them."""

    def __init__(self, *_: object, **__: object) -> None: ...

    @staticmethod
    def register(*_: object, **__: object) -> None:
        """mlx-lm registers a tokenizer of its own with transformers."""


class _PlaceholderModule(ModuleType):
    def __getattr__(self, name: str) -> type[_Placeholder]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Placeholder,), {})


class _Placeholders(MetaPathFinder, Loader):
    def __init__(self, names: re.Pattern[str], places: Mapping[str, Sequence[str]]) -> None:
        self._names, self._places = names, places

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if not self._names.fullmatch(name):
            return None
        spec = ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [*self._places.get(name, ())]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@contextmanager
def placeholders(
    names: re.Pattern[str], places: Mapping[str, Sequence[str]] | None = None
) -> Iterator[None]:
    """Has imports in the block get placeholders for modules of such names.

    places: the folders of those whose submodules are real, by their names."""
    finder = _Placeholders(names, places or {})
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def taken_modules(*packages: str) -> dict[str, ModuleType]:
    """Removes the modules of packages from those that are imported."""
    names = [name for name in sys.modules if name.partition(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def left_out() -> Iterator[None]:
    """Imports in the block get placeholders for the unused packages; later imports get the real
    ones, which a checkpoint's own code may want."""
    if not sys.modules.keys().isdisjoint(UNUSED):
        yield
        return
    try:
        with placeholders(re.compile(rf"({'|'.join(UNUSED)})(\..*)?")):
            yield
    finally:
        taken_modules(*UNUSED)
