"""What a host says of itself, as one line of JSON.

The text of this file is sent to the host's Python, which may be older than the one here and may
lack every package, this one too. So it imports the standard library only.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import socket
import sys
from typing import Any

HASHED_FILES = ("config.json", "model.safetensors.index.json")
MOST_HASHED = 64 << 20
"""The most bytes of a file that are hashed."""


def main(wanted: dict[str, Any]) -> None:
    facts = {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "memory": memory(),
        "packages": {name: version(name) for name in wanted["packages"]},
        "source": source(),
        "places": {place: why_not(place) for place in wanted["places"]},
        "models": {folder: model(folder) for folder in wanted["folders"]},
    }
    sys.stdout.write("\n" + json.dumps(facts) + "\n")


def memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def source() -> str:
    """A digest of this package's code, since a checkout may have other code of the same version."""
    spec = importlib.util.find_spec("mlx_server")
    if spec is None or not spec.origin:
        return ""
    digest, root = hashlib.sha256(), os.path.dirname(spec.origin)
    for folder, folders, names in os.walk(root):
        folders.sort()
        for path in sorted(os.path.join(folder, name) for name in names if name.endswith(".py")):
            with open(path, "rb") as file:
                content = hashlib.sha256(file.read()).hexdigest()
            digest.update(f"{os.path.relpath(path, root)} {content}\n".encode())
    return digest.hexdigest()


def why_not(place: str) -> str:
    """Empty if a process can listen there; else the name of the error."""
    ip, _, port = place.partition(":")
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((ip, int(port)))
            tried.listen(1)
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error.errno))
    return ""


def model(folder: str) -> dict[str, Any]:
    digest, nbytes = hashlib.sha256(), 0
    try:
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            if name.endswith(".safetensors"):
                nbytes += os.path.getsize(path)
            if name in HASHED_FILES:
                with open(path, "rb") as file:
                    digest.update(name.encode() + b"\0" + file.read(MOST_HASHED))
    except OSError as error:
        return {"bytes": 0, "digest": "", "problem": error.strerror or "can't be read"}
    return {"bytes": nbytes, "digest": digest.hexdigest(), "problem": ""}
