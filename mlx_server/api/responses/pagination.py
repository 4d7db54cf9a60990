"""How a list of items is asked for."""

from typing import Annotated, Literal

from fastapi import Query

from mlx_server import limits

After = Annotated[str | None, Query(description="Items behind this one.")]
Limit = Annotated[int, Query(ge=1, le=limits.PAGE_ITEMS.value)]
Sorted = Annotated[Literal["asc", "desc"], Query()]
