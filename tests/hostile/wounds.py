"""Engines that can be hurt from outside: the real one, with a knife in it.

What is written here is Python's `sitecustomize` of the server's processes. In the engine it wraps
what the engine does, and strikes as soon as the file says so.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

POISON = 777
"""The `max_tokens` of a request that ends each engine that begins it."""

IGNORED = (
    "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
)
NO_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
)

KNIFE = """
import ctypes, os, sys, time
from pathlib import Path

if "mlx_server.worker.process" in sys.orig_argv:
    wound = Path(__file__).with_name("wound")

    def strike(where):
        if not wound.exists() or not wound.read_text().startswith(where):
            return
        _, how = wound.read_text().split(maxsplit=1)
        if how.startswith("slow"):
            return time.sleep(float(how.split()[1]))
        wound.unlink()
        if how.startswith("["):
            raise RuntimeError(how)
        if how == "raise":
            raise SystemError("a wound")
        # with the GIL, or without
        sleep = ctypes.PyDLL(None).sleep if how == "hold" else time.sleep
        sleep(3600)

    def poisoned(batch, tier=None):
        if any(row.request.max_tokens == POISON for row in batch.all_rows):
            os.abort()

    def wrapped(owner, name, where):
        real = getattr(owner, name)

        def first_struck(*args, **options):
            strike(where)
            if where == "compute":
                poisoned(*args)
            return real(*args, **options)

        setattr(owner, name, first_struck)

    from mlx_server.worker.unused_imports import left_out
    with left_out():
        from mlx_server.worker import batch, engine
        from mlx_server.worker.constrained_decoding import grammar_compiler
    wrapped(engine.Engine, "_step", "step")
    wrapped(batch.Batch, "step", "compute")
    wrapped(engine.Engine, "_load_piece", "load")
    wrapped(grammar_compiler, "compiled", "compile")
"""


@dataclass(frozen=True)
class Knife:
    folder: Path

    def strike(self, where: str, how: str) -> None:
        """Once, at a step, what it computes, load or compile: raise, block, or hold, which stops
        all threads; or what MLX says of a GPU command that failed. Or slow by
        some seconds, until it is healed."""
        ready = self.folder / "ready"
        ready.write_text(f"{where} {how}")
        ready.rename(self.folder / "wound")

    def heal(self) -> None:
        (self.folder / "wound").unlink()


@contextmanager
def knife(folder: Path, more: str = "") -> Iterator[Knife]:
    """In servers that are started within. more: what else is done in their processes."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"POISON = {POISON}\n{KNIFE}{more}")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    with patch.dict(os.environ, PYTHONPATH=path):
        yield Knife(folder)
