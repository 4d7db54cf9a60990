"""The query parameters of lists of items."""

from typing import Annotated, Literal

from fastapi import Query

from mlx_server import limits

After = Annotated[str | None, Query(description="Id after which the list starts.")]
Limit = Annotated[int, Query(ge=1, le=limits.PAGE_ITEMS)]
Sorted = Annotated[Literal["asc", "desc"], Query()]
