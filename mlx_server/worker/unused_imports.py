"""Leaves out what mlx-lm imports and the engine never calls.

mlx-lm imports transformers for its tokenizers and huggingface_hub for its downloads. The engine
gets token ids and folders: importing the two took two thirds of its start, and 30 MB.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

UNUSED = ("transformers", "huggingface_hub")


class _Placeholder:
    """Stands for every name of an unused package; mlx-lm derives classes from some of them."""

    @staticmethod
    def register(*_: object, **__: object) -> None:
        """mlx-lm registers a tokenizer of its own with transformers."""


class _Placeholders(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in UNUSED:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _PlaceholderModule(ModuleType):
    def __getattr__(self, name: str) -> type[_Placeholder]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Placeholder,), {})


@contextmanager
def left_out() -> Iterator[None]:
    """Imports in the block get placeholders for the unused packages; later imports get the real
    ones, which a checkpoint's own code may want."""
    if not sys.modules.keys().isdisjoint(UNUSED):
        yield
        return
    finder = _Placeholders()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [each for each in sys.modules if each.partition(".")[0] in UNUSED]:
            del sys.modules[name]
