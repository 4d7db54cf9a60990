"""Kinds of values that several settings have."""

import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo


def absolute(path: str, info: ValidationInfo | None) -> str:
    folder = info.context if info and isinstance(info.context, Path) else Path()
    return os.path.abspath(folder / os.path.expanduser(path))


def size_in_bytes(size: object) -> object:
    """Converts a size such as `12GB` to bytes."""
    if not isinstance(size, str):
        return size
    if found := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(MB|GB)", size):
        return int(Decimal(found[1]) * {"MB": 10**6, "GB": 10**9}[found[2]])
    raise ValueError("should be a size such as 12GB or 800MB")


Bytes = Annotated[int, Field(gt=0), BeforeValidator(size_in_bytes)]
BytesOrNone = Annotated[int, Field(ge=0), BeforeValidator(size_in_bytes)]
